"""Compiled code that several rooms share."""
