"""Which meeting over a store is the present one, where the store outlives the processes.

torchrun's does: it starts all ranks anew after a failure or a change of members, and its store has the keys of those
before. Nothing that it tells a rank is then both new and the same on all ranks: agents of several nodes count restarts
each for itself. So rank 0 names a meeting, and the others take that name once rank 0 has seen them there.

Keys:

    meeting             the name of the latest meeting, as rank 0 set it
    <name>/here/<rank>  a counter: who makes it 1 has come to that meeting
    <name>/met          set when all have come
"""

from __future__ import annotations

import secrets
import time

from ..errors import StoreTimeoutError
from ..rendezvous import Store
from ..rendezvous.store import listed
from ..rendezvous.waiting import LateWarning, fetch_for

_LATEST = "meeting"
_POLL_SECONDS = 0.01


def meet_anew(store: Store, rank: int, size: int, timeout: float) -> str:
    """A name that all ranks of this meeting get, and nobody got before; collective.

    Args:
        timeout: seconds.

    Raises:
        StoreTimeoutError: not all ranks came in time; on rank 0 it names them.
        StoreError: the store is gone.
    """
    if rank == 0:
        return _call(store, size, timeout)
    return _come(store, rank, size, timeout)


def _call(store: Store, size: int, timeout: float) -> str:
    """On rank 0: name the meeting, and wait for all."""
    name = f"{size}/{secrets.token_hex(8)}"
    store.set(_LATEST, name)
    keys = {rank: _here(name, rank) for rank in range(1, size)}

    def missing() -> str:
        return f"rank(s) {listed([rank for rank, key in keys.items() if not store.check([key])])}"

    fetch_for(store, list(keys.values()), (), timeout, f"joining as rank 0 of {size}", missing=missing)
    store.set(f"{name}/met", b"")
    return name


def _come(store: Store, rank: int, size: int, timeout: float) -> str:
    """On the others: come to the latest meeting, and go on to a later one while this one has not met."""
    end, late, doing = time.monotonic() + timeout, LateWarning(), f"joining as rank {rank} of {size}"
    seen = mine = ""

    def missing() -> str:
        return "others, which rank 0 knows," if mine else "rank 0"

    while not (mine and store.check([f"{mine}/met"])):
        latest = (store.peek([_LATEST])[0] or b"").decode()
        if latest != seen:
            seen = latest
            # One of another size, or to which this rank has come, is of processes before.
            is_new = latest.startswith(f"{size}/") and store.add(_here(latest, rank), 1) == 1
            mine = latest if is_new else ""
            continue
        late.look(doing, missing)
        if time.monotonic() > end:
            raise StoreTimeoutError(f"{doing}: {missing()} did not come within {timeout:.3g} s")
        time.sleep(_POLL_SECONDS)
    return mine


def _here(name: str, rank: int) -> str:
    return f"{name}/here/{rank}"
