"""The traceback of an uncaught error has the user's frames, and none of the package's."""

from __future__ import annotations

import subprocess
import sys
import traceback

import numpy as np
import pytest

import fastcoll as dist
from fastcoll.errors import (
    ArrayError,
    GroupError,
    PeerDiedError,
    UsageError,
    follows,
    rebuilt,
    reduced,
    shorten,
)

SCRIPT = """
import sys, threading
import numpy as np
import fastcoll as dist

def uncaught(call):
    try:
        call()
    except Exception:
        sys.excepthook(*sys.exc_info())
    print("--", file=sys.stderr)

class Unpicklable:
    def __reduce__(self):
        raise ValueError("not this one")

def again():
    try:
        dist.reduce(x, "first")
    except dist.UsageError as error:
        raise KeyError("mine") from error

uncaught(lambda: dist.get_rank())
dist.init_process_group("shm")
x = np.ones(3)
uncaught(lambda: dist.all_reduce([1.0]))
uncaught(lambda: dist.reduce(x, 1))
uncaught(lambda: dist.reduce(x, "first"))
uncaught(lambda: dist.irecv(x, 0).wait(0.01))
uncaught(lambda: dist.all_gather_object([None], lambda: None))
uncaught(lambda: dist.all_gather_object([None], Unpicklable()))
uncaught(again)
thread = threading.Thread(target=dist.new_group, args=([3],))
thread.start()
thread.join()
work = dist.broadcast(x, 5)
"""


class CommandError(OSError):
    def __init__(self, *, command: str) -> None:
        super().__init__(2, "not found", command)
        self.command = command


class SlottedError(Exception):
    __slots__ = ("key",)

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


@pytest.mark.parametrize(
    "error",
    [
        KeyError("a"),
        FileNotFoundError(2, "not found", "file"),
        UnicodeDecodeError("ascii", b"\xff", 0, 1, "not ASCII"),
        ImportError("no module", name="a"),
        StopIteration(3),
        CommandError(command="ls"),
        dist.CollectiveTimeoutError("timed out", [1]),
        dist.StoreTimeoutError("timed out"),
        ArrayError("wrong"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_exception_is_built_as_it_was(error: Exception) -> None:
    again = reduced(error)
    assert again is not None
    copied = rebuilt(*again)
    assert type(copied) is type(error)
    assert (str(copied), copied.args, vars(copied)) == (str(error), error.args, vars(error))
    for name in ("filename", "errno", "reason", "name", "value"):
        assert getattr(copied, name, None) == getattr(error, name, None)


def test_a_class_that_needs_its_constructor_is_left_to_pickle() -> None:
    assert reduced(SlottedError("a")) is None


def test_no_frames_of_the_package_are_printed() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=150)
    assert done.returncode == 1
    assert "fastcoll/" not in done.stderr
    *calls, last = done.stderr.split("--\n")
    said = [text.splitlines()[-1] for text in calls]
    assert said[0] == (
        "fastcoll.errors.NotInitializedError: there is no default process group; call init_process_group first"
    )
    assert said[2].endswith(
        "dst is 1; the group WORLD has ranks 0..0; this is a world of one: start it with -n 2, as in python -m "
        "fastcoll.launch -n 2 script.py"
    )
    # A cause is shown if it adds to the error's text, and so is an error that was raised from one of ours.
    assert ["direct cause" in text for text in calls] == [False] * 6 + [True] * 2
    assert "in __reduce__\nValueError: not this one\n" in calls[6]
    assert "in again\nfastcoll.errors.UsageError: dst is 'first'; give a rank as an integer\n" in calls[7]
    in_thread, _, main = last.rpartition("Traceback")
    assert "UsageError: ranks is [3]; expected" in in_thread
    assert len(main.splitlines()) == 3, "the header, the user's frame, the error"


def test_debug_shows_all_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    def frames() -> list[str]:
        with pytest.raises(UsageError) as caught:
            dist.reduce(np.ones(1), 0, group=3)  # type: ignore[arg-type]
        shorten(caught.value)
        return [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]

    assert frames() == ["frames"]
    monkeypatch.setenv("FASTCOLL_DEBUG", "1")
    assert frames() == ["frames", "reduce", "member_of", "_refuse"]


def test_errors_that_cause_one_another_are_shortened() -> None:
    try:
        try:
            dist.reduce(np.ones(1), 0, group=3)  # type: ignore[arg-type]
        except UsageError as first:
            try:
                raise ValueError("the step failed") from first
            except ValueError:
                raise first  # noqa: B904 - its context is the ValueError, whose cause is this error
    except UsageError as error:
        shorten(error)
        frames = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    assert set(frames) == {"test_errors_that_cause_one_another_are_shortened"}


def raised(error: Exception, inside: Exception, cause: Exception | None = None) -> Exception:
    """Raise an error while another one is handled, and return it."""
    try:
        try:
            raise inside
        except Exception:
            raise error from cause
    except Exception as caught:
        return caught


def test_an_error_that_a_group_error_has_caused_follows() -> None:
    gone = PeerDiedError("rank 1 is gone")
    wrapped = raised(RuntimeError("the step failed"), gone, gone)
    for error in (gone, GroupError("no"), wrapped, raised(KeyError(), gone), raised(KeyError(), wrapped)):
        assert follows(error), error
    for other in (None, ValueError("no data"), raised(ValueError(), UsageError("no"))):
        assert not follows(other), other


def test_a_circle_of_causes_ends() -> None:
    first, second = ValueError(), ValueError()
    first.__cause__, second.__cause__ = second, first
    assert not follows(first)


class Tasks(Exception):
    """As ExceptionGroup, which Python 3.10 does not have."""

    def __init__(self, *exceptions: object) -> None:
        self.exceptions = exceptions


def test_a_group_of_exceptions_follows_with_a_member() -> None:
    assert follows(Tasks(Tasks(KeyError(), GroupError("rank 1 is gone"))))
    assert not follows(Tasks(ValueError(), "GroupError"))
