"""Configuration of all tests: `pytester`, with which the pytest plugin tests itself, and hosts on this machine."""

pytest_plugins = ["pytester", "hosts.plugin"]
