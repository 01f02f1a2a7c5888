"""The public functions: collectives, messages, and collectives of Python objects."""
