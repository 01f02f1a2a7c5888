"""The messages of a start: a fixed number for each rank, however many ranks a job has."""

from __future__ import annotations

import math
import threading
from collections import Counter
from functools import partial

import pytest

from fastcoll.job.backends import parse_backend
from fastcoll.job.job import Job
from fastcoll.job.lease import StoreLease, times_settled
from fastcoll.rendezvous import assemble
from fastcoll.rendezvous.assemble import GroupMeeting
from fastcoll.rendezvous.join import join
from fastcoll.store import PrefixStore, TCPStore, tcp_store, waiting
from fastcoll.store.table import Op, StoreRequest

LIMIT = 100.0
SIZE, PER_REQUEST = 12, 5


def test_each_rank_sends_a_fixed_number_of_messages_until_it_has_the_default_group(
    in_threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only rank 0 reads the record of every rank, in blocks of keys. No wait here lasts until a rank polls."""
    sent: Counter[str] = Counter()
    lock = threading.Lock()

    class Counted(tcp_store.TCPConnection):
        def open(self, secret: bytes, deadline: float) -> None:
            with lock:
                sent["OPEN"] += 1
            super().open(secret, deadline)

        def ask(self, request: StoreRequest, deadline: float) -> object:
            with lock:
                sent[Op(request.op).name] += 1
            return super().ask(request, deadline)

    def start(rank: int, port: int) -> None:
        with TCPStore("127.0.0.1", port, timeout=LIMIT) as store:
            view = PrefixStore("fastcoll", store)
            times_settled(view, rank)
            members = join(view, rank, SIZE, "cpu:auto", LIMIT)
            lease = StoreLease(view, members, rank, lambda: None)
            making = Job(lease, parse_backend(None), LIMIT).making(range(SIZE), "making the default group")
            with making, GroupMeeting(PrefixStore("world", view), members, rank, LIMIT, "meeting") as meeting:
                if rank == 0:
                    meeting.publish("terms", b"terms")
                else:
                    meeting.receive("terms")
                assert meeting.assemble(rank) == list(range(SIZE))
            all_have_met.wait(LIMIT)
            lease.leave(LIMIT)

    monkeypatch.setattr(tcp_store, "TCPConnection", Counted)
    monkeypatch.setattr(waiting, "SLICE_SECONDS", LIMIT)
    monkeypatch.setattr(assemble, "_LOOK_SECONDS", LIMIT)
    monkeypatch.setattr(assemble, "MAX_KEYS_PER_REQUEST", PER_REQUEST)
    found: list[Counter[str]] = []
    all_have_met = threading.Barrier(SIZE, lambda: found.append(sent.copy()))
    with TCPStore("127.0.0.1", 0, is_master=True) as server:
        sent.clear()
        assert in_threads(*(partial(start, rank, server.port) for rank in range(SIZE))) == [None] * SIZE
    others, blocks = SIZE - 1, math.ceil(SIZE / PER_REQUEST)
    assert found == [
        {
            "OPEN": SIZE,
            "PEEK": SIZE,  # whether the rank is of an earlier job
            "ADD": 3 * others + 5,
            "SET": 2 * SIZE + 4,  # the records, the addresses, the terms of both meetings, and the two lists
            "GET": 4 * others + 2 * blocks,
        }
    ]
