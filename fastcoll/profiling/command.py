"""`python -m fastcoll profile -- PROGRAM`: run a program, then show how its ranks spent their time.

The ranks write into a folder (FASTCOLL_PROFILE_DIR), whoever starts them. The exit code is the program's. The table
goes to stderr, so that the program's output stays as it is.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType

from ..errors import UnavailableError, UsageError
from ..pages import html_page
from ..pages.output_files import writable
from ..record.call_log import SUFFIX, load
from .merging import Profile, RankLog, merge
from .profile_page import write_html
from .report import text_of, write_json

_NOT_FOUND, _NOT_RUN, _MISUSED = 127, 126, 2  # a shell's exit codes
_PASSED_ON = signal.SIGTERM, signal.SIGHUP
_FROM_THE_TERMINAL = signal.SIGINT, signal.SIGQUIT  # Ctrl-C and Ctrl-\, which the program gets, too


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; return the program's exit code, 128 + N if signal N has ended it."""
    parser = argparse.ArgumentParser(
        prog="python -m fastcoll profile",
        usage="%(prog)s [options] -- PROGRAM [ARGUMENT ...]",
        description="Run a program, for example `python train.py` or `python -m fastcoll.launch -n 4 train.py`. When "
        "it has ended, print on stderr how its ranks spent their time: for each operation and size the calls, the "
        "bytes, the time in transfer, and the time waiting for other ranks.",
        epilog="exit code: the program's.",
    )
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="also write a page with plots; needs plotly"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures, for programs")
    parser.add_argument(
        "--folder",
        type=Path,
        help="where the ranks write (default: a temporary folder); for several machines one that all of them share",
    )
    parser.add_argument("program", nargs="+", metavar="PROGRAM", help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    try:
        if given.html is not None:
            html_page.require()
        for path in filter(None, (given.html, given.json)):
            writable(path)
        if given.folder is not None:
            given.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            writable(given.folder / SUFFIX)
    except (UnavailableError, UsageError, OSError) as error:
        print(f"fastcoll profile: {error}", file=sys.stderr)
        return _MISUSED
    with ExitStack() as stack:
        folder = given.folder or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="fastcoll-profile-"))
        )
        before = {path.name: _identity(path) for path in folder.glob(f"*{SUFFIX}")}
        code = run_program(given.program, folder)
        return code if show(folder, before, given.html, given.json) else code or 1


def run_program(program: Sequence[str], folder: Path) -> int:
    """Run the program to its end, and pass signals on to it, except those that a terminal sends to both."""
    environment = os.environ | {"FASTCOLL_PROFILE_DIR": os.fspath(folder.absolute())}
    started: list[subprocess.Popen[bytes]] = []
    pending: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        pending.append(number)
        for process in started:
            process.send_signal(number)

    wanted = dict.fromkeys(_PASSED_ON, pass_on) | dict.fromkeys(_FROM_THE_TERMINAL, lambda *_: None)
    # An ignored signal stays ignored, such as SIGHUP under nohup; the program inherits that.
    handlers = {
        number: signal.signal(number, handler)
        for number, handler in wanted.items()
        if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        started.append(subprocess.Popen(program, env=environment))
        for number in pending:
            started[0].send_signal(number)
        code = started[0].wait()
    except OSError as error:
        print(f"fastcoll profile: {program[0]} cannot be run: {error.strerror}", file=sys.stderr)
        return _NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_RUN
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _identity(path: Path) -> tuple[int, int]:
    """Return inode and modification time: a log that is written again under its old name has others."""
    state = path.stat()
    return state.st_ino, state.st_mtime_ns


def show(folder: Path, before: Mapping[str, tuple[int, int]], html: Path | None, json: Path | None) -> bool:
    """Print the profile, and write the files; return whether all files could be written."""
    found = read(folder, before)
    if found is None:
        print("fastcoll profile: no process made a group, so there is nothing to show", file=sys.stderr)
        return html is None and json is None
    sys.stdout.flush()
    print(f"\nfastcoll profile: {text_of(found)}", end="", file=sys.stderr)
    written = True
    for path, write in ((html, write_html), (json, write_json)):
        if path is None:
            continue
        try:
            write(found, path)
            print(f"{path.absolute()}", file=sys.stderr)
        except OSError as error:
            print(f"fastcoll profile: {path} cannot be written: {error.strerror}", file=sys.stderr)
            written = False
    return written


def read(folder: Path, left_out: Mapping[str, tuple[int, int]]) -> Profile | None:
    """Merge the logs in a folder; None if there are none. Of processes with the same rank, the last one counts.

    `left_out`: the names and identities of logs that do not count, because they were there before.
    """
    logs: dict[int, RankLog] = {}
    for path in folder.glob(f"*{SUFFIX}"):
        with suppress(OSError, ValueError, KeyError):
            if left_out.get(path.name) != _identity(path):
                mine = RankLog(*load(os.fspath(path).removesuffix(SUFFIX)))
                other = logs.get(mine.rank)
                if (
                    other is None
                    or other.about["began"] + other.about["epoch"] < mine.about["began"] + mine.about["epoch"]
                ):
                    logs[mine.rank] = mine
    return merge([logs[rank] for rank in sorted(logs)]) if logs else None
