"""Output is relayed line by line; the last lines are kept for the log line about a failed rank."""

from __future__ import annotations

import io
import os
import traceback
from collections.abc import Iterator

import pytest

from fastcoll import errors
from fastcoll.launch import ranks
from fastcoll.launch.ranks import Relay, follows


class Stream:
    """A pipe with a relay at its end."""

    def __init__(self) -> None:
        source, self.pipe = os.pipe()
        self.passed, self.log = b"", io.BytesIO()
        self.relay = Relay(source, self.take, b"[3] ", self.log)

    def write(self, data: bytes) -> bytes:
        os.write(self.pipe, data)
        assert self.relay.pump()
        return self.passed

    def take(self, data: bytes) -> None:
        self.passed += data


@pytest.fixture
def stream() -> Iterator[Stream]:
    made = Stream()
    yield made
    os.close(made.pipe)


def test_whole_lines_get_a_prefix(stream: Stream) -> None:
    stream.relay.pump_all()  # nothing to read does not block
    assert stream.write(b"one\ntw") == b"[3] one\n"
    assert stream.write(b"o\n\n") == b"[3] one\n[3] two\n[3] \n"
    assert stream.log.getvalue() == b"one\ntwo\n\n"


def test_a_log_whose_disk_is_full_is_given_up(stream: Stream, caplog: pytest.LogCaptureFixture) -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        stream.relay._log = full
        assert stream.write(b"one\n") == b"[3] one\n"
        assert stream.write(b"two\n") == b"[3] one\n[3] two\n"
    assert caplog.messages == ["no more is written to /dev/full: No space left on device"]


def test_progress_bars(stream: Stream) -> None:
    assert stream.write(b"10%\r") == b"[3] 10%\r"  # shown before the line goes on
    assert stream.write(b"20%\r\nend") == b"[3] 10%\r[3] 20%\r\n"


def test_the_end_without_a_line_end(stream: Stream) -> None:
    os.write(stream.pipe, b"one\ntwo")
    stream.relay.finish()
    assert stream.passed == b"[3] one\n[3] two\n"
    assert stream.log.closed


def test_the_end_of_the_source() -> None:
    source, pipe = os.pipe()
    os.close(pipe)
    ended = Relay(source, -1, b"", None)
    assert not ended.pump()
    ended.finish()


def test_very_long_lines_are_cut(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_LONGEST_LINE", 10)
    assert stream.write(b"0123456789A") == b"[3] 0123456789A\n"
    assert stream.write(b"B\n") == b"[3] 0123456789A\n[3] B\n"


def test_the_last_lines_are_remembered(stream: Stream) -> None:
    stream.write(b"".join(b"%d\n" % number for number in range(100)) + b"the last")
    assert stream.relay.last_lines() == "".join(f"{number}\n" for number in range(60, 100)) + "the last"


def test_a_source_that_never_ends_is_left() -> None:
    """A program that outlives its rank writes for ever."""

    def take(data: bytes) -> None:
        nonlocal passed
        passed += len(data)
        assert passed < 1 << 25

    passed = 0
    endless = Relay(os.open("/dev/zero", os.O_RDONLY), take, b"", None)
    endless.finish()
    endless.finish()
    assert passed


def test_only_the_failure_of_a_group_follows_from_another_ranks() -> None:
    def last_lines(error: Exception) -> str:
        return "a line of the program\n" + "".join(traceback.format_exception(error))

    for kind in (errors.GroupError, *errors.GroupError.__subclasses__()):
        assert follows(last_lines(kind("rank 1 is gone"))), kind
    lines = "not fastcoll.errors.GroupError"
    for error in (ValueError("no data"), errors.UsageError("no"), RuntimeError(lines)):
        assert not follows(last_lines(error)), error
    assert not follows("")


def test_failures_of_groups_are_found_in_exception_groups_and_colours() -> None:
    assert follows("  | fastcoll.errors.PeerDiedError: rank 1 is gone\n  +----")
    assert follows("    \x1b[35m| \x1b[1;35mfastcoll.errors.GroupError\x1b[0m: \x1b[35mno\x1b[0m")
    assert not follows("  | ValueError: fastcoll.errors.GroupError")
