"""Announcements and the election, without sockets: lost datagrams, late, dead and stale candidates."""

from __future__ import annotations

import dataclasses
import random
import time
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcoll.rendezvous import multicast
from fastcoll.rendezvous.assemble import MovedError
from fastcoll.rendezvous.multicast import (
    FRESH_SECONDS,
    MAX_DATAGRAM,
    STEP_SECONDS,
    Announcement,
    Election,
    job_digest,
)
from fastcoll.system.processes import ProcessId

SOMEBODY = ProcessId(host="host", pid=7, start_time=5, boot_id="boot", pid_namespace="pid:[1]")


def announcement(nonce: str, port: int = 0) -> Announcement:
    return Announcement(job_digest(""), nonce, 1.5, 3, "10.0.0.1" if port else "", port, **vars(SOMEBODY))


@pytest.mark.parametrize("secret", [b"", b"one"])
def test_announcements_survive_the_wire_and_need_the_same_secret(secret: bytes) -> None:
    one = announcement("ab", 5)
    data = one.seal(secret)
    assert len(data) <= MAX_DATAGRAM
    assert Announcement.unseal(data, secret) == one
    assert one.where == "pid 7 on host"
    assert [Announcement.unseal(data, other) for other in {b"", b"one", b"two"} - {secret}] == [None] * 2


def test_fields_out_of_range_are_ignored() -> None:
    assert Announcement.unseal(announcement("ab").seal(b""), b"") is not None
    wrong = {
        "port": [-1, 65536, True],
        "world_size": [0],
        "nonce": [5],
        "time": ["x"],
        "pid": ["7"],
        "leaving": [1],
    }
    for name, values in wrong.items():
        for value in values:
            changed = dataclasses.replace(announcement("ab"), **{name: value})
            assert Announcement.unseal(changed.seal(b""), b"") is None, changed


@given(st.binary(max_size=200), st.booleans())
def test_random_datagrams_are_ignored(data: bytes, start_right: bool) -> None:
    assert Announcement.unseal(b"FASTMC1\n" * start_right + data, b"") is None


def test_the_lowest_of_enough_leads() -> None:
    assert Election("1", 1).should_lead(0)
    low, high = Election("1", 2), Election("2", 2)
    assert not low.should_lead(0)
    low.record(announcement("2"), 0)
    high.record(announcement("1"), 0)
    assert low.should_lead(0)
    assert not high.should_lead(0)


def test_a_silent_candidate_does_not_count() -> None:
    election = Election("1", 2)
    election.record(announcement("2"), 0)
    assert not election.should_lead(FRESH_SECONDS + 0.1)
    assert election.fresh(FRESH_SECONDS + 0.1) == []


def test_a_candidate_that_has_left_does_not_count_and_is_not_watched() -> None:
    election = Election("1", 2)
    election.record(announcement("2"), 0)
    assert election.there() == [announcement("2")]
    election.record(dataclasses.replace(announcement("2"), leaving=True), 0)
    election.record(announcement("2"), 0)  # it was overtaken on another interface
    assert not election.should_lead(0)
    assert election.there() == []
    assert election.names(0) == ["pid 7 on host (which has left)"]


def test_the_next_leads_when_the_lowest_never_offers() -> None:
    """A stale candidate has the lowest nonce, for example in a recorded announcement."""
    election = Election("2", 2)
    times = [step / 10 for step in range(30)]
    leads = []
    for now in times:
        election.record(announcement("1"), now)
        leads.append(election.should_lead(now))
    assert times[leads.index(True)] == pytest.approx(STEP_SECONDS, abs=0.11)


def test_after_an_ignored_candidate_the_next_one_has_its_time_to_lead() -> None:
    election = Election("3", 2)
    for nonce in "12":
        election.record(announcement(nonce), 0)
    assert not election.should_lead(0)
    election.pass_over("1")
    assert not election.should_lead(0.9 * STEP_SECONDS)
    assert not election.should_lead(1.1 * STEP_SECONDS)
    election.record(announcement("2"), 1.5)
    assert election.should_lead(1.95 * STEP_SECONDS)


def test_an_offer_is_followed_even_if_few_have_come() -> None:
    election = Election("1", 5)
    election.record(announcement("3", 50), 0)
    election.record(announcement("2", 40), 0)
    election.record(announcement("1", 9), 0)  # its own, which comes back
    assert len(election.fresh(0)) == 2
    assert election.offer(0).port == 40
    election.pass_over("2")
    assert election.offer(0).port == 50
    assert not election.gives_way(0)
    election.record(announcement("0", 30), 0)
    assert election.gives_way(0)


def test_a_leader_that_has_given_way_does_not_offer_its_store(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("FRESH_SECONDS", 1000.0), ("_GIVING_WAY_SECONDS", 0.0)):
        monkeypatch.setattr(multicast, name, seconds)
    sent: list[bytes] = []
    group: Any = SimpleNamespace(send=sent.append, receive=lambda seconds, size: iter(()))
    candidate = multicast._Candidate(group, "here", announcement("5"), b"", 60.0)
    candidate._election.record(announcement("1", 50), time.monotonic())
    with pytest.raises(MovedError):
        candidate.lead("127.0.0.1", None)
    candidate.leave()
    ports = [each.port for each in (Announcement.unseal(data, b"") for data in sent) if each]
    assert ports[0] > 0
    assert ports[-1] == 0


@given(st.integers(2, 6), st.integers(0, 2**32), st.floats(0, 0.8))
def test_with_loss_and_late_starters_exactly_one_store_remains(size: int, seed: int, loss: float) -> None:
    """All candidates announce every 0.1 s; each datagram is lost with probability `loss`."""
    draw = random.Random(seed)
    elections = [Election(f"{draw.getrandbits(64):016x}", size) for _ in range(size)]
    starts = [draw.uniform(0, 3) for _ in range(size)]
    store_of: list[int | None] = [None] * size  # candidate -> the one whose store it uses
    for step in range(600):
        now = step * 0.1
        awake = [i for i in range(size) if starts[i] <= now]
        for i in awake:
            message = announcement(elections[i].nonce, 1000 + i if store_of[i] == i else 0)
            if store_of[i] in (None, i):
                for j in awake:
                    if draw.random() >= loss:
                        elections[j].record(message, now)
        for i in awake:
            if store_of[i] == i and elections[i].gives_way(now) and (offer := elections[i].offer(now)):
                store_of = [None if store == i else store for store in store_of]
                store_of[i] = offer.port - 1000 if store_of[offer.port - 1000] == offer.port - 1000 else None
            elif store_of[i] is None and (offer := elections[i].offer(now)):
                leader = offer.port - 1000
                if store_of[leader] == leader:
                    store_of[i] = leader
                else:
                    elections[i].pass_over(offer.nonce)
            elif store_of[i] is None and elections[i].should_lead(now):
                store_of[i] = i
        if None not in store_of and len(set(store_of)) == 1:
            return
    raise AssertionError(f"no single store after 60 s: {store_of}")
