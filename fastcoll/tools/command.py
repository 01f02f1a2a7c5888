"""The command `fastcoll`, or `python -m fastcoll`: the first argument names a command, the rest are its arguments.

A command is a module with a function `main(words) -> exit code`. The module is imported only when its command is
called, so that `status` does not wait for the imports of `bench`.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from importlib import import_module

from .._version import __version__
from ..system.standard_streams import run_command

COMMANDS = {
    "status": ("fastcoll.tools.running", "the jobs on this machine, and the ranks that hold them up"),
    "top": ("fastcoll.tools.top", "what the ranks of a job do, in a live view"),
    "doctor": ("fastcoll.tools.doctor", "what works on this machine, what does not, and cures for problems"),
    "env": ("fastcoll.tools.environment", "the launcher that was detected, and the settings in force"),
    "profile": ("fastcoll.profiling.command", "how the ranks of a program spend their time in calls"),
    "trace": ("fastcoll.tools.trace", "what went wrong first in a job, from the files that its ranks wrote"),
    "launch": ("fastcoll.launch.command", "start a program with several ranks"),
    "bench": ("fastcoll.bench.__main__", "time and verify operations"),
    "warmup": ("fastcoll.warmup", "compile functions now, so that programs do not wait for it"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that a command line names; return its exit code."""
    name, *words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help"):
        print("usage: python -m fastcoll COMMAND ...\n")
        for name, (_, about) in COMMANDS.items():
            print(f"  {name:8} {about}")
        print("\npython -m fastcoll COMMAND --help: its options")
        return 0
    if name in ("-V", "--version"):
        print(f"fastcoll {__version__}")
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        cure = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
        print(f"fastcoll: there is no command {name!r}; {cure}", file=sys.stderr)
        return 2
    return run_command(lambda: import_module(COMMANDS[name][0]).main(words))
