"""Ranks on any hosts, over TCP."""
