"""Pages of results with plots, which open without a network."""
