"""Requests for new groups: each rank publishes its request, and the ranks compare all requests.

The first of the ranks that must agree reads all requests, and publishes the place of the first one that differs from
its own. The others wait for this value. While a rank is late, they read only the request of the first rank, so one
check of n ranks costs the store a multiple of n keys, and not n * n.

Keys, under the group's key:

    asked/<rank>      the digest of this rank's request
    alike/<digest>    a counter: how many ranks have made the request
    request/<digest>  the request, published by the rank that makes the counter 1
    <digest>/...      the meeting (rendezvous/assemble.py) of the ranks that wait for equal requests
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from functools import partial

from ..errors import FastcollError, MismatchError, RendezvousError
from ..rendezvous.assemble import Meeting, loads
from ..store.store import listed
from ..store.waiting import fetch_for
from .lease import StoreLease

_log = logging.getLogger("fastcoll")


class GroupRequest:
    """This rank's request for a group of `ranks` with `backend`, under `key`, the group's key in the job's store."""

    def __init__(self, lease: StoreLease, key: str, ranks: Sequence[int], backend: str) -> None:
        self.key, self.doing = key, f"new_group({ranks})"
        self._lease, self._ranks, self._backend = lease, ranks, backend
        self._text = json.dumps([ranks, backend]).encode()
        self.digest = _digest(self._text)

    def publish(self) -> None:
        """Publish the request's digest, and the request itself if no other rank has made the same request.

        If each of 10,000 ranks published the request, this would take 590 MB.
        """
        store = self._lease.store
        if store.add(f"{self.key}/alike/{self.digest.hex()}", 1) == 1:
            store.set(f"{self.key}/request/{self.digest.hex()}", self._text)
        store.set(f"{self.key}/asked/{self._lease.rank}", self.digest)

    def is_agreed(self, asked: Sequence[int], timeout: float, all_ranks: bool) -> bool:
        """Wait for the requests of the ranks `asked`, and return whether they are the same as this one.

        False: the others have made another group, for which this rank has left out its call. This cannot happen if
        all ranks of the world are asked (`all_ranks`), because members then wait for all ranks.

        Raises:
            MismatchError: the requests differ for another reason.
            PeerDiedError, AbortedError, StoreTimeoutError: a rank died, left the job, or did not come in time.
        """
        with _RequestMeeting(self._lease, self, asked, timeout) as meeting:
            differs = meeting.first_that_differs()
        if differs is None:
            return True
        rank, mine = asked[differs], self._lease.rank
        digest = self._lease.store.get(f"{self.key}/asked/{rank}")
        request = self._lease.store.get(f"{self.key}/request/{digest.hex()}")
        other, theirs = json.loads(request)
        if not other:
            raise MismatchError(f"{self.doing}, call {self.key}: rank {rank} gave wrong arguments: {theirs}")
        left_out = None if all_ranks else self._left_out(rank, request, timeout)
        if left_out is None:
            raise MismatchError(
                f"new_group, call {self.key}: rank {mine} asks for ranks {self._ranks} with {self._backend}, rank "
                f"{rank} for ranks {other} with {theirs}; every rank must make the same groups in the same order"
            )
        _log.warning(
            "rank %d has not called new_group(%s), as others have, and takes part in their next call of new_group; all "
            "ranks of the world must call it, or pass use_local_synchronization=True",
            mine,
            left_out,
        )
        return False

    def _left_out(self, rank: int, request: bytes, timeout: float) -> list[int] | None:
        """Return the ranks of the group for which this rank has left out its call; None: it has left out no call.

        `request` is the one that `rank` has published under this key. This rank has left out a call in two cases:

        1. `request` is for a group without this rank, and all members of that group have published the same request.
           Then this rank has left out the call for that group.
        2. This rank has published the same request in an earlier call, in which `rank` requested another group. Then
           this rank has left out the call for that other group.
        """
        if not self.key.startswith("group"):
            return None
        store, mine = self._lease.store, self._lease.rank
        ranks: list[int] = json.loads(request)[0]
        if mine not in ranks:
            alike = set(self._wait_for_all(ranks, timeout))
            return ranks if alike == {_digest(request)} else None
        for number in range(int(self.key.removeprefix("group"))):
            ours, theirs = store.peek([f"group{number}/asked/{who}" for who in (mine, rank)])
            if ours == _digest(request) and theirs is not None and theirs != ours:
                # None if the arguments of `rank` were refused in that call.
                return list(json.loads(store.get(f"group{number}/request/{theirs.hex()}"))[0]) or None
        return None

    def _wait_for_all(self, ranks: Sequence[int], timeout: float) -> list[bytes]:
        """Wait for the digests of these ranks, which make a group without this rank."""
        doing = f"new_group({ranks}), which others call"
        return fetch_for(
            self._lease.store,
            [f"{self.key}/asked/{rank}" for rank in ranks],
            [self._lease.members[rank] for rank in ranks],
            timeout,
            doing,
            partial(self._lease.raise_if_left, ranks, doing),
        )


class _RequestMeeting(Meeting):
    """The meeting of the ranks `asked` that have made the same request; a rank's contribution is its digest."""

    def __init__(
        self, lease: StoreLease, request: GroupRequest, asked: Sequence[int], timeout: float
    ) -> None:
        name = f"{request.key}/{request.digest.hex()}"
        super().__init__(lease.store, name, asked.index(lease.rank), len(asked), timeout, request.doing)
        self._lease, self._request, self._asked = lease, request, asked
        self.watched += [lease.members[rank] for rank in asked]

    def first_that_differs(self) -> int | None:
        """Return the place of the first rank whose request differs from this one; None: all requests are the same."""

        def compare(digests: list[bytes]) -> bytes:
            different = (place for place, each in enumerate(digests) if each != self._request.digest)
            return json.dumps(next(different, None)).encode()

        try:
            place: int | None = loads(self.collect(compare))
        except _FirstDiffersError:
            return 0
        return place

    def learned(self, place: int, value: bytes) -> None:
        if self.place != 0 and value != self._request.digest:
            raise _FirstDiffersError

    def look_at_missing(self, places: Sequence[int]) -> None:
        # The first rank publishes which others have left. It may itself leave before it has compared the requests.
        needed = places if self.place == 0 else [0]
        self._lease.raise_if_left([self._asked[place] for place in needed], self.doing)

    def key_of(self, place: int) -> str:
        return f"{self._request.key}/asked/{self._asked[place]}"

    def names(self, places: Sequence[int]) -> str:
        return listed([self._lease.members[self._asked[place]] for place in places])

    def publish_error(self, error: BaseException) -> None:
        if not isinstance(error, FastcollError | OSError):
            me = self._lease.members[self._lease.rank]  # which the text of Ctrl-C does not name
            error = RendezvousError(f"{self.doing}: {me} was ended by {type(error).__name__}")
        super().publish_error(error)


def publish_refusal(lease: StoreLease, key: str, error: Exception) -> None:
    """Publish a request without ranks, by which the ranks that wait for this rank's request see why there is none."""
    GroupRequest(lease, key, [], f"{type(error).__name__}: {error}").publish()


class _FirstDiffersError(Exception):
    """The first rank has made another request."""


def _digest(request: bytes) -> bytes:
    return hashlib.sha256(request).digest()
