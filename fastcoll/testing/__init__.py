"""The pytest plugin: tests that run on several ranks."""
