"""All ranks register in a store and learn who the others are.

The first to come lays down the terms (world size, backend, version), which everyone else compares with its own. Each
claims its rank, and brings its registration to a meeting, which rank 0 makes into a list. Keys, all under "join/",
besides those of the meeting:

    first           a counter: who makes it 1 sets terms
    terms           the registration of the first that came
    claim/<rank>    a counter: who makes it 1 owns the rank
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence

from ..core.members import Member
from ..errors import PeerDiedError, StoreTimeoutError, UsageError
from .assemble import Meeting, member_key
from .compact import pack, unpack
from .store import Store
from .waiting import fetch_for

logger = logging.getLogger("fastcoll")

_NAME = "join"
# How long the second to claim a rank waits for the first one's registration, to name it.
_NAMING_SECONDS = 2.0


def join(store: Store, rank: int, world_size: int, backend: str, timeout: float) -> list[Member]:
    """Meet all other ranks; the members in the order of their ranks.

    Every rank of the world must call this once with the same store; a store that is used again needs
    a PrefixStore of its own each time.

    Args:
        timeout: seconds.

    Raises:
        UsageError: the rank is out of range or claimed twice, or world size, backend or version
            differ between ranks; raised on all that wait, naming both processes.
        PeerDiedError: a process that had registered has ended.
        StoreTimeoutError: ranks did not come in time; the message names them.
        StoreError: the store is gone.
    """
    check_rank(rank, world_size)
    me = Member.here(rank, world_size, backend)
    with _Joining(store, me, timeout) as joining:
        joining.agree_on_terms()
        joining.claim_rank()
        members = unpack(Member, joining.gather(me.to_bytes(), joining.list_all), world_size)
    logger.debug("joined as %s of %d", me, world_size)
    return members


def registered(store: Store, rank: int) -> Member | None:
    """Who has registered under `rank` in a store that ranks join by; None when nobody has. Never blocks."""
    value = store.peek([member_key(_NAME, rank)])[0]
    return None if value is None else Member.from_bytes(value)


def check_rank(rank: int, world_size: int) -> None:
    """Refuse a rank that is none of `world_size`.

    Raises:
        UsageError: it is out of range, or the world is empty.
    """
    if world_size < 1:
        raise UsageError(f"world_size must be 1 or more, got {world_size}")
    if not 0 <= rank < world_size:
        raise UsageError(f"rank {rank} is not in a world of {world_size}; ranks are 0 to {world_size - 1}")


class _Joining(Meeting):
    def __init__(self, store: Store, me: Member, timeout: float) -> None:
        super().__init__(store, _NAME, me.rank, me.world_size, timeout, f"joining as {me}")
        self._me, self._timeout = me, timeout
        self._members: dict[int, Member] = {}

    def agree_on_terms(self) -> None:
        """Lay down the terms as the first that comes, or compare them with those of the first."""
        if self.store.add("join/first", 1) == 1:
            self.say("terms", self._me.to_bytes())
            return
        first = Member.from_bytes(self.hear("terms"))
        self.watched.append(first)
        for what, field in (("world size", "world_size"), ("backend", "backend"), ("version", "version")):
            theirs, ours = getattr(first, field), getattr(self._me, field)
            if theirs != ours:
                raise UsageError(
                    f"the ranks disagree about the {what}: {first} has {theirs}, {self._me} has {ours}; start all "
                    "with the same"
                )

    def claim_rank(self) -> None:
        """Be the only one with this rank."""
        rank = self._me.rank
        if self.store.add(f"join/claim/{rank}", 1) == 1:
            return
        with contextlib.suppress(StoreTimeoutError, PeerDiedError):
            patience = min(self.left(), _NAMING_SECONDS)
            fetch_for(self.store, [member_key(_NAME, rank)], self.watched, patience, "joining")
        first = registered(self.store, rank)
        if first is not None and first.is_process(self._me):
            raise UsageError(
                f"{self._me} joins for the second time: its first try has failed, or goes on in another thread; "
                "let all ranks start again"
            )
        name = "one that has not registered" if first is None else first.where
        raise UsageError(
            f"rank {rank} is claimed by two processes, {name} and {self._me.where}; give each process a rank of its own"
        )

    def wait(self, keys: Sequence[str], missing: Callable[[], str] | None = None) -> list[bytes]:
        try:
            return super().wait(keys, lambda: f"rank(s) {self.missing()}")
        except StoreTimeoutError as error:
            raise StoreTimeoutError(
                f"{self.doing}: not all of {self.size} ranks came within {self._timeout:g} s; missing: {self.missing()}"
            ) from error

    def learned(self, place: int, value: bytes) -> None:
        member = self._members[place] = Member.from_bytes(value)
        if member not in self.watched[:1]:  # the one that set the terms is
            self.watched.append(member)

    def list_all(self, _: Sequence[bytes]) -> bytes:
        """What rank 0 publishes."""
        return pack([self._members[rank] for rank in range(self.size)])
