"""Meetings in a store: every member writes a contribution, and all get all contributions, or all raise the same error.

A member's place is its number in the meeting, from 0. The member at place 0 reads the contributions, many with one
request, and publishes one short value made from them under the key `end`. So n members cost the store about 2 n
messages and not n * n. A member that fails publishes its error under the same key. The other members wait only for this
key, so they notice a failure as early as a success.

Keys, under the meeting's name:

    member/<place>  the contribution of that member
    <topic>         a value that place 0 publishes before the end
    missing         the members that have not come yet, as text, written by place 0
    end             one byte, MET, FAILED or MOVED (cancelled), and then the value or the error; written only once
    late/end        another one, for a failure after the members have met
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import islice
from typing import Any, TypeVar

from .. import errors
from ..errors import AbortedError, FastcollError, GroupError, PeerDiedError, RendezvousError, StoreError
from ..store.store import StalledError, Store, limited, listed
from ..store.table import MAX_KEYS_PER_REQUEST
from ..store.waiting import LateWarning, fetch_for
from ..system.processes import Member, ProcessId, forget, types_of

MET, FAILED, MOVED = b"L", b"F", b"M"
_GROUP = "group"
_MOST_BYTES = 4096  # the largest contribution
_LOOK_SECONDS = 0.25  # `look` reads the store at most once in this time
# Within this time after a member has detected a failure, the other members can read it in the store, even if no core is
# free.
_PUBLISH_SECONDS = 2.0
# The larger its argument `crowd` is, the less often `fetch_for` polls and calls `between`. A meeting passes at most
# this number, so that a multicast leader, which announces itself in `between`, does so often enough.
_MOST_AT_ONCE = 1000
# If a meeting has more members than this, only place 0, which knows who is missing, warns about late members. The
# others warn only while place 0 itself is missing. So a late member of a thousand is not reported a thousand times.
_ALL_WARN = 32
# Errors that a member publishes. A broken connection or a lost store is not published, because all members detect it.
_PUBLISHED: dict[str, type[FastcollError]] = {
    kind.__name__: kind
    for kind in (
        errors.UsageError, errors.UnavailableError, errors.ResourceError, RendezvousError, errors.StoreTimeoutError,
        PeerDiedError, AbortedError,
    )
}  # fmt: skip

M = TypeVar("M", bound="Meeting")
P = TypeVar("P", bound=ProcessId)


class MovedError(Exception):
    """The meeting was cancelled; the process should look for another meeting."""


def assemble(
    store: Store, members: Sequence[Member], rank: int, mine: Any, timeout: float, doing: str
) -> list[Any]:
    """Return the contributions of all members (JSON, at most 4 KiB each), in the order of `members`.

    Every member calls this once, with a `store` (often a PrefixStore) that no other meeting uses. Every error begins
    with `doing`.

    Raises:
        PeerDiedError, StoreTimeoutError: a member died, or did not come in time; all members name it.
        FastcollError: another member failed; all members raise its error.
        StoreError: the store is gone, or has other data under these keys.
    """
    with GroupMeeting(store, members, rank, timeout, doing) as meeting:
        return meeting.assemble(mine)


class Meeting:
    """A meeting, as one member sees it.

    It is a context manager: if the block raises an exception, the exception is published to the other members.

    Args:
        doing: what this member does, with which error texts begin.
        me: this member's name, which is put before the texts of the errors that it publishes; empty if the texts have
            the name already.
        between: called when this member contributes, and a few times a second while it waits.
        began: the value of time.monotonic() from which `timeout` counts; None: now.

    Attributes:
        known: the contributions that this member has read, by place. Place 0 reads all contributions; the other members
            read only that of place 0.
        watched: the processes whose death ends the meeting.
        timeout: the seconds for the whole meeting, counted from `began`.
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
        # The places whose contributions this member has still to read, in order.
        self._sought: dict[int, None] = dict.fromkeys(range(size) if place == 0 else [0])
        self._published_missing = ""
        self._is_over = False  # this member has read a failure or cancellation of the meeting
        self._looked = time.monotonic()

    def learned(self, place: int, value: bytes) -> None:
        """Handle a member's contribution. Called once for each member; an exception ends the meeting."""

    def look_at_missing(self, places: Sequence[int]) -> None:
        """Raise if a member whose contribution is missing will not come. Called a few times a second during a wait.

        `places`: those of the missing contributions, among the ones that this member reads.
        """

    def key_of(self, place: int) -> str:
        """Return the key of the contribution of the member at `place`."""
        return member_key(self.name, place)

    def names(self, places: Sequence[int]) -> str:
        """Return the names of the members at these places, for messages about missing members."""
        return listed(places)

    def __enter__(self: M) -> M:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.publish_error(error)
            forget(self.watched)

    def gather(self, mine: bytes, combine: Callable[[list[bytes]], bytes]) -> bytes:
        """Write this member's contribution; return the value that `combine` makes of all contributions at place 0."""
        key = self.key_of(self.place)
        if self.place == 0:
            self.store.set(key, mine)
            return self.collect(combine)
        self._between()
        return self._ended(lambda limit: [self.store.exchange(key, mine, self._end.key, limit)])

    def collect(self, combine: Callable[[list[bytes]], bytes]) -> bytes:
        """Do what `gather` does after this member has written its contribution."""
        self._between()
        if self.place == 0:
            while self._sought:
                places = list(islice(self._sought, MAX_KEYS_PER_REQUEST))
                self._learn(places, self.wait([self.key_of(place) for place in places]))
            value = combine([self.known[place] for place in range(self.size)])
            if self._end.decide(MET, value):
                return value
        return self._ended()

    def _ended(self, first: Callable[[timedelta], list[bytes]] | None = None) -> bytes:
        """Wait for the end, at first by the request `first`; return its value, or raise its error."""
        end = self.wait([self._end.key], first=first)[0]
        self._check(end)
        return end[1:]

    def assemble(self, mine: Any, check: Callable[[list[Any]], None] = lambda _: None) -> list[Any]:
        """Write this member's contribution, and return all contributions.

        Place 0 calls `check` with the contributions before it publishes them.
        """

        def combine(values: list[bytes]) -> bytes:
            everybody = [loads(value) for value in values]
            check(everybody)
            return compact(everybody)

        everybody = expand(self.gather(json.dumps(mine).encode(), combine), self.size * _MOST_BYTES)
        if not isinstance(everybody, list) or len(everybody) != self.size:
            raise StoreError(f"the contributions of {self.size} members cannot be read: {everybody!r:.80}")
        return everybody

    def publish(self, topic: str, value: bytes = b"") -> None:
        """Publish a value under `topic`. Only place 0 calls this; the others read the value by `receive`."""
        self.store.set(f"{self.name}/{topic}", value)

    def receive(self, topic: str) -> bytes:
        """Wait for the value that place 0 publishes under `topic`, and return it."""
        return self.wait([f"{self.name}/{topic}"], lambda: self.names([0]))[0]

    def wait(
        self,
        keys: Sequence[str],
        missing: Callable[[], str] | None = None,
        first: Callable[[timedelta], list[bytes]] | None = None,
    ) -> list[bytes]:
        """Wait for keys until the meeting's timeout, and return their values.

        Raises a failure that another member publishes meanwhile. `missing` returns the names of the missing members;
        for `first` see `fetch_for`.
        """
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
            first=first,
        )

    def look(self) -> None:
        """Raise the failure that another member has published, if any.

        A loop that waits for something without `wait` calls this. It reads the store at most once in 0.25 s.
        """
        if time.monotonic() - self._looked >= _LOOK_SECONDS:
            self._looked = time.monotonic()
            with suppress(StalledError):
                self._look_at([])

    def raise_published(self) -> None:
        """Wait up to 2 s for another member to publish an error, and raise that error; return if none does."""
        ends: list[bytes] = []
        grace = min(self.left(), _PUBLISH_SECONDS)
        with suppress(errors.StoreTimeoutError):
            ends = fetch_for(self.store, [self._end.key], self.watched, grace, self.doing)
        for end in ends:
            self._check(end)

    def publish_error(self, error: BaseException) -> None:
        """Publish an error of this member, which the other members then raise.

        Publish nothing if this member has read a failure that another member published, or if all members detect this
        kind of error themselves.
        """
        if self._is_over or isinstance(error, MovedError):
            return
        from ..system.address import no_descriptor  # imports sockets

        error = no_descriptor(error, self.doing) or error
        text = f"{self._sender}: {error}" if self._sender else str(error)
        if not isinstance(error, FastcollError):  # for example Ctrl-C
            text = f"{self._sender or self.doing}: it was ended by {type(error).__name__}"
            error = RendezvousError(text)
        if type(error).__name__ not in _PUBLISHED:
            return
        ranks = error.ranks if isinstance(error, GroupError) else ()
        record = json.dumps({"kind": type(error).__name__, "text": text, "ranks": list(ranks)}).encode()
        # StoreError: the store's server is stopped, or gone, which all members detect.
        with limited(self.store, _PUBLISH_SECONDS), suppress(StoreError):
            if not self._end.decide(FAILED, record):
                self._late.decide(FAILED, record)

    def left(self) -> float:
        """Return the seconds until the timeout."""
        return max(self.began + self.timeout - time.monotonic(), 0.0)

    def _look_around(self) -> None:
        """Raise a failure that was published, and read new contributions. Called between two short waits."""
        sought = list(self._sought)
        self._learn(sought, self._look_at([self.key_of(place) for place in sought]))
        if self.place and not self._sought and self.size > _ALL_WARN:
            self._late_warning.silence()
        self.look_at_missing(list(self._sought))
        if self.place == 0 and self._published_missing != (missing := self.missing()):
            self._published_missing = missing
            self.publish("missing", missing.encode())
        self._between()

    def _look_at(self, keys: Sequence[str]) -> list[bytes | None]:
        end, late, *values = self.store.peek([self._end.key, self._late.key, *keys], 0)
        self._check(end)
        self._check(late)
        return values

    def _check(self, end: bytes | None) -> None:
        """Raise the failure or cancellation in this value of an `end` key; return if the value has neither."""
        if end is None or end[:1] == MET:
            return
        self._is_over = True
        if end[:1] == MOVED:
            raise MovedError
        try:
            found = json.loads(end[1:])
            kind, text = _PUBLISHED[found["kind"]], str(found["text"])
            ranks = [int(rank) for rank in found["ranks"]]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise StoreError(f"the error of the failed meeting cannot be read: {end[1:81]!r}") from error
        raise kind(text, ranks) if issubclass(kind, GroupError) else kind(text)

    def _learn(self, places: Sequence[int], values: Sequence[bytes | None]) -> None:
        for place, value in zip(places, values, strict=True):
            if value is not None and place not in self.known:
                self.known[place] = value
                self._sought.pop(place, None)
                self.learned(place, value)

    def missing(self) -> str:
        """Return the names of the members that have not come, as far as this member can know them."""
        if self.place == 0:
            return self.names(list(self._sought))
        if 0 not in self.known:
            return f"{self.names([0])} (it collects the others)"
        published = self.store.peek([f"{self.name}/missing"], 0)[0]
        return "others, not known yet" if published is None else published.decode()


class GroupMeeting(Meeting):
    """The meeting of a group's members, in a store that only this group uses. Each member has the list of all."""

    def __init__(
        self, store: Store, members: Sequence[Member], rank: int, timeout: float, doing: str
    ) -> None:
        super().__init__(store, _GROUP, rank, len(members), timeout, doing, str(members[rank]))
        self.watched += members
        self._members = members

    def names(self, places: Sequence[int]) -> str:
        return listed([self._members[place] for place in places])


class Ending:
    """The end of the meeting `name`, which is written only once, under `key`."""

    def __init__(self, store: Store, name: str) -> None:
        self.key = f"{name}/end"
        self._store = store

    def decide(self, kind: bytes, content: bytes = b"") -> bool:
        """Write the end of the meeting unless it has one; return whether this call wrote it."""
        return self._store.set_new([self.key], [kind + content]) == [None]


def member_key(name: str, place: int) -> str:
    """Return the key under which a member of the meeting `name` writes its contribution."""
    return f"{name}/member/{place}"


def loads(data: bytes) -> Any:
    """Parse the JSON that another rank wrote, or raise StoreError."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"the data of a rank in the store cannot be read: {data[:80]!r}") from error


def compact(value: Any) -> bytes:
    """Return `value` as compressed JSON: if n ranks read a value with n entries, the store sends n * n entries."""
    return zlib.compress(json.dumps(value, separators=(",", ":")).encode())


def expand(data: bytes, most: int) -> Any:
    """Return the value that was given to `compact`.

    StoreError: it has more than `most` bytes of JSON, or is no JSON; peers are not trusted.
    """
    reader = zlib.decompressobj()
    try:
        text = reader.decompress(data, most + 1)  # 0 would mean without limit
        if len(text) > most or not reader.eof or reader.unused_data:
            raise ValueError(f"it is cut off, or longer than {most} bytes")
        return json.loads(text)
    except (ValueError, RecursionError, zlib.error) as error:
        raise StoreError(f"the data of another rank cannot be read ({error}): {data[:40]!r}") from error


def pack(processes: Sequence[ProcessId]) -> bytes:
    """Pack one or more processes, all of one class, into one value for the store.

    The value has one list for each field, because this compresses well: a process takes 14 bytes. As a JSON object, a
    process would take 280 bytes.
    """
    return compact(
        {name: [getattr(each, name) for each in processes] for name in types_of(type(processes[0]))}
    )


def unpack(kind: type[P], data: bytes, count: int) -> list[P]:
    """Return the `count` processes of class `kind` that `pack` wrote, or raise StoreError."""
    columns, types = expand(data, count * _MOST_BYTES), types_of(kind)
    if not isinstance(columns, dict) or set(columns) != set(types):
        raise StoreError(f"the list of all ranks cannot be read: expected the fields {', '.join(types)}")
    for name, column in columns.items():
        if not isinstance(column, list) or len(column) != count or set(map(type, column)) != {types[name]}:
            raise StoreError(
                f"the list of all ranks cannot be read: {name} must be {count} of {types[name].__name__}"
            )
    return [kind(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]
