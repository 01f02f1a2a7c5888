"""Messages between two ranks: the part that does not depend on the transport."""
