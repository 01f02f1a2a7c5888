"""Configuration of all tests: `pytester`, with which the pytest plugin tests itself."""

pytest_plugins = ["pytester"]
