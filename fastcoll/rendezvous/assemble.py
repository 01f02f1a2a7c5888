"""Meetings in a store: each member brings a contribution, and all get everybody's, or all raise the same error.

The member at place 0 collects what the others bring, many with one message, and publishes what it makes of them as
one short value. So n members cost the store some 8 n messages and not n * n. What ends the meeting for one member is
published in that value's place: who waits, waits for this key alone, so a failure comes as soon as success.

Keys, under the meeting's name:

    member/<place>  what that member brings
    <word>          what place 0 lays down before that, for the others to hear
    missing         who has not come yet, as text, from place 0
    decided, end    a counter: who makes it 1 writes the end; one byte, MET, FAILED or MOVED, and the value or failure
    late/...        the same once more, for what fails after the members have met
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, TypeVar

from .. import errors
from ..errors import FastcollError, PeerDiedError, RendezvousError, StoreError
from ..store.store import StalledError, Store, listed
from ..store.table import MAX_KEYS_PER_REQUEST
from ..store.waiting import LateWarning, fetch_for
from ..system.processes import Member, ProcessId, forget, types_of

MET, FAILED, MOVED = b"L", b"F", b"M"
_GROUP = "group"
_MOST_BYTES = 4096  # that a member brings
_LOOK_SECONDS = 0.25
_TELLING_SECONDS = (
    2.0  # from when a member has seen a failure until the others can read of it, on a full machine
)
# However many wait: `between` keeps a multicast leader's announcements fresh.
_MOST_AT_ONCE = 1000
# Those that all find themselves (a broken connection, a lost store) are not told.
_TOLD: dict[str, type[FastcollError]] = {
    kind.__name__: kind
    for kind in (
        errors.UsageError, errors.UnavailableError, errors.ResourceError, RendezvousError, errors.StoreTimeoutError,
        PeerDiedError,
    )
}  # fmt: skip

M = TypeVar("M", bound="Meeting")
P = TypeVar("P", bound=ProcessId)


class MovedError(Exception):
    """The meeting was called off; the process should look for another."""


def assemble(
    store: Store, members: Sequence[Member], rank: int, mine: Any, timeout: float, doing: str
) -> list[Any]:
    """Everybody's contribution (JSON, at most 4 KiB), in the order of `members`; once in a store of their own.

    `doing`, what this is for, starts every message.

    Raises:
        PeerDiedError, StoreTimeoutError: a member died, or did not come in time; named on all members.
        FastcollError: another member could not go on; its name and reason, the same on all members.
        StoreError: the store is gone, or holds something else.
    """
    with GroupMeeting(store, members, rank, timeout, doing) as meeting:
        return meeting.assemble(mine)


class Meeting:
    """One meeting as one of its members has it. A context manager: an exception inside is told to the others.

    Args:
        me: begins what this member tells of its failures; empty: they name it themselves.
        between: called once this member has brought its contribution, and a few times a second while it waits.
        began: the value of time.monotonic() from which `timeout` counts; None: now.

    Attributes:
        known: what the members bring, as far as this one knows: place 0 learns of all, the others of place 0.
        watched: the processes whose death ends the meeting.
        timeout: the seconds that the meeting may take in all, counted from `began`.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        place: int,
        size: int,
        timeout: float,
        doing: str,
        me: str = "",
        between: Callable[[], None] | None = None,
        began: float | None = None,
    ) -> None:
        self.known: dict[int, bytes] = {}
        self.watched: list[ProcessId] = []
        self.store, self.name, self.place, self.size = store, name, place, size
        self.doing, self._sender, self._between = doing, me, between or (lambda: None)
        self.timeout, self.began = timeout, began or time.monotonic()
        self._late_warning = LateWarning()
        self._end, self._late = Ending(store, name), Ending(store, f"{name}/late")
        self._sought: dict[int, None] = dict.fromkeys(range(size) if place == 0 else [0])
        self._told_missing = ""
        self._is_over = False  # another member has ended it
        self._looked = time.monotonic()

    def learned(self, place: int, value: bytes) -> None:
        """Called with what each member brings, once; what it raises ends the meeting."""

    def names(self, places: Sequence[int]) -> str:
        """Who is at these places, which have not come yet, for messages."""
        return listed(places)

    def __enter__(self: M) -> M:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.tell(error)
            forget(self.watched)

    def gather(self, mine: bytes, combine: Callable[[list[bytes]], bytes]) -> bytes:
        """Bring a contribution; returns what place 0 makes of all of them by `combine`."""
        self.store.set(member_key(self.name, self.place), mine)
        self._between()
        if self.place == 0:
            while self._sought:
                places = list(islice(self._sought, MAX_KEYS_PER_REQUEST))
                self._learn(places, self.wait([member_key(self.name, place) for place in places]))
            value = combine([self.known[place] for place in range(self.size)])
            if self._end.decide(MET, value):
                return value
        end = self.wait([self._end.key])[0]
        self._check(end)
        return end[1:]

    def assemble(self, mine: Any, check: Callable[[list[Any]], None] = lambda _: None) -> list[Any]:
        """As the function, with a check that place 0 makes before all get them."""

        def combine(values: list[bytes]) -> bytes:
            everybody = [loads(value) for value in values]
            check(everybody)
            return compact(everybody)

        everybody = expand(self.gather(json.dumps(mine).encode(), combine), self.size * _MOST_BYTES)
        if not isinstance(everybody, list) or len(everybody) != self.size:
            raise StoreError(f"what {self.size} members bring cannot be read: {everybody!r:.80}")
        return everybody

    def say(self, word: str, value: bytes = b"") -> None:
        """Lay down what the others `hear`."""
        self.store.set(f"{self.name}/{word}", value)

    def hear(self, word: str) -> bytes:
        """What place 0 has said under that word, waited for."""
        return self.wait([f"{self.name}/{word}"], lambda: self.names([0]))[0]

    def wait(self, keys: Sequence[str], missing: Callable[[], str] | None = None) -> list[bytes]:
        """The values of keys, waited for until the meeting ends; `missing` names who is waited for."""
        return fetch_for(
            self.store,
            keys,
            self.watched,
            self.left(),
            self.doing,
            self._look_around,
            missing=missing or self.missing,
            late=self._late_warning,
            crowd=min(self.size, _MOST_AT_ONCE) if self.place else 1,
            limit=self.timeout,
        )

    def look(self) -> None:
        """Raise what another member has told; for waits elsewhere, of which only one in 0.25 s asks the store."""
        if time.monotonic() - self._looked >= _LOOK_SECONDS:
            self._looked = time.monotonic()
            with suppress(StalledError):
                self._look_at([])

    def hear_why(self) -> None:
        """Raise why the meeting has failed, which others, who have seen that already, tell about now.

        Returns where nobody does.
        """
        told: list[bytes] = []
        grace = min(self.left(), _TELLING_SECONDS)
        with suppress(errors.StoreTimeoutError):
            told = fetch_for(self.store, [self._end.key], self.watched, grace, self.doing)
        for end in told:
            self._check(end)

    def tell(self, error: BaseException) -> None:
        """Let the others raise this error, unless one of them has told it, or they find it themselves."""
        if self._is_over or isinstance(error, MovedError):
            return
        from ..system.address import no_descriptor  # imports sockets

        error = no_descriptor(error, self.doing) or error
        text = f"{self._sender}: {error}" if self._sender else str(error)
        if not isinstance(error, FastcollError):  # Ctrl-C, for one
            text = f"{self._sender or self.doing}: it was ended by {type(error).__name__}"
            error = RendezvousError(text)
        if type(error).__name__ not in _TOLD:
            return
        ranks = error.ranks if isinstance(error, PeerDiedError) else ()
        record = json.dumps({"kind": type(error).__name__, "text": text, "ranks": list(ranks)}).encode()
        before = self.store.timeout
        self.store.set_timeout(min(before.total_seconds(), _TELLING_SECONDS))
        try:
            with suppress(StoreError):  # its server is gone, which all members detect, or stopped
                if not self._end.decide(FAILED, record):
                    self._late.decide(FAILED, record)
        finally:
            self.store.set_timeout(before)

    def left(self) -> float:
        """Seconds until the timeout."""
        return max(self.began + self.timeout - time.monotonic(), 0.0)

    def _look_around(self) -> None:
        """Between two short waits: has someone ended it, and who has come?"""
        sought = list(self._sought)
        self._learn(sought, self._look_at([member_key(self.name, place) for place in sought]))
        if self.place == 0 and self._told_missing != (missing := self.missing()):
            self._told_missing = missing
            self.say("missing", missing.encode())
        self._between()

    def _look_at(self, keys: Sequence[str]) -> list[bytes | None]:
        end, late, *values = self.store.peek([self._end.key, self._late.key, *keys], 0)
        self._check(end)
        self._check(late)
        return values

    def _check(self, end: bytes | None) -> None:
        """Raise if this is the end of a meeting that was not one."""
        if end is None or end[:1] == MET:
            return
        self._is_over = True
        if end[:1] == MOVED:
            raise MovedError
        try:
            found = json.loads(end[1:])
            kind, text = _TOLD[found["kind"]], str(found["text"])
            ranks = [int(rank) for rank in found["ranks"]]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise StoreError(f"why the meeting failed cannot be read: {end[1:81]!r}") from error
        raise PeerDiedError(text, ranks) if kind is PeerDiedError else kind(text)

    def _learn(self, places: Sequence[int], values: Sequence[bytes | None]) -> None:
        for place, value in zip(places, values, strict=True):
            if value is not None and place not in self.known:
                self.known[place] = value
                self._sought.pop(place, None)
                self.learned(place, value)

    def missing(self) -> str:
        """Who has not come, as far as this member can tell."""
        if self.place == 0:
            return self.names(list(self._sought))
        if 0 not in self.known:
            return f"{self.names([0])} (it collects the others)"
        told = self.store.peek([f"{self.name}/missing"], 0)[0]
        return "others, not known yet" if told is None else told.decode()


class GroupMeeting(Meeting):
    """The meeting of a group's members, who know one another, in the group's own store."""

    def __init__(
        self, store: Store, members: Sequence[Member], rank: int, timeout: float, doing: str
    ) -> None:
        super().__init__(store, _GROUP, rank, len(members), timeout, doing, str(members[rank]))
        self.watched += members
        self._members = members

    def names(self, places: Sequence[int]) -> str:
        return listed([self._members[place] for place in places])


class Ending:
    """How the meeting `name` ends: once, for all alike. `key` is where it is written."""

    def __init__(self, store: Store, name: str) -> None:
        self.key = f"{name}/end"
        self._decided = f"{name}/decided"
        self._store = store

    def decide(self, kind: bytes, content: bytes = b"") -> bool:
        """End the meeting so, unless it has ended; whether this was the end."""
        if self._store.add(self._decided, 1) != 1:
            return False
        self._store.set(self.key, kind + content)
        return True


def member_key(name: str, place: int) -> str:
    """Where a member of the meeting `name` brings its contribution."""
    return f"{name}/member/{place}"


def loads(data: bytes) -> Any:
    """The JSON that another rank wrote; a StoreError where it is none."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"what a rank wrote into the store cannot be read: {data[:80]!r}") from error


def compact(value: Any) -> bytes:
    """What JSON can hold, as a short value: what each of n ranks reads of all n, a store sends n * n times."""
    return zlib.compress(json.dumps(value, separators=(",", ":")).encode())


def expand(data: bytes, most: int) -> Any:
    """What `compact` was given, if that is at most so many bytes of JSON: a peer is not trusted to write little."""
    reader = zlib.decompressobj()
    try:
        text = reader.decompress(data, most + 1)  # 0 would mean without limit
        if len(text) > most or not reader.eof or reader.unused_data:
            raise ValueError(f"it is cut off, or longer than {most} bytes")
        return json.loads(text)
    except (ValueError, RecursionError, zlib.error) as error:
        raise StoreError(f"what another rank wrote cannot be read ({error}): {data[:40]!r}") from error


def pack(processes: Sequence[ProcessId]) -> bytes:
    """Processes, at least one and all of one class, as one value of a store: in columns, whose neighbours are alike.

    Each of n ranks reads it. A record takes 14 bytes so, and 280 as a JSON object.
    """
    return compact(
        {name: [getattr(each, name) for each in processes] for name in types_of(type(processes[0]))}
    )


def unpack(kind: type[P], data: bytes, count: int) -> list[P]:
    """The `count` processes of class `kind` that `pack` wrote; a StoreError where it is anything else."""
    columns, types = expand(data, count * _MOST_BYTES), types_of(kind)
    if not isinstance(columns, dict) or set(columns) != set(types):
        raise StoreError(f"the list of all ranks cannot be read: expected the fields {', '.join(types)}")
    for name, column in columns.items():
        if not isinstance(column, list) or len(column) != count or set(map(type, column)) != {types[name]}:
            raise StoreError(
                f"the list of all ranks cannot be read: {name} must be {count} of {types[name].__name__}"
            )
    return [kind(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]
