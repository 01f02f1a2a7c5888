"""Nodes in shared memory, joined by a network: a group of groups."""
