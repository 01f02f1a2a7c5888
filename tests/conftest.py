"""Configuration of all tests: `pytester`, with which the pytest plugin tests itself, and hosts on this machine."""

import signal

pytest_plugins = ["pytester", "hosts.plugin"]

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # A shell's background job ignores Ctrl-C, and so would every process that a test starts and interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
