"""What `top` shows of other machines; tests/hosts/test_top.py runs it on several hosts."""

from __future__ import annotations

import json
import os

import pytest

from fastcoll.launch.node_views import ASKED, NODES, view_key
from fastcoll.record.record import GroupRecord, MemberRecord, Record
from fastcoll.store import TCPStore
from fastcoll.tools import node_view, other_nodes
from fastcoll.tools.blame import Process, Rank
from fastcoll.tools.jobs_here import ProcessMemory, RunningJob
from fastcoll.tools.other_nodes import NodeView, OtherNodes, decode, encode, merged
from fastcoll.tools.rates import RankRates, View

HOST = os.uname().nodename
HERE = RankRates(0, 100, "running", 0.5, "WORLD", "barrier()", 7, True, calls=3.0, waits=0.2, late=1)
ABSENT = RankRates(1, 0, "", call="on far")
THERE = RankRates(
    1, 200, "sleeping", 0.1, "WORLD", "barrier()", 6, memory=ProcessMemory(1 << 20, 4096), host="far"
)
OWN = View("2 ranks", [HERE, ABSENT], 20, 0.5, (-1, 1.0), ["rank 1 is late"])


def job_on_two_hosts() -> RunningJob:
    """Return a job whose rank 0 is this process, and whose rank 1 is on another machine."""
    members = MemberRecord(0, HOST, os.getpid()), MemberRecord(1, "far", 200)
    group = GroupRecord("WORLD", 1, "auto", 0, members, 0, 0, 0, (), None, 0, -1, (), "")
    record = Record("job", 0, 2, HOST, os.getpid(), 1, 0.0, "1", (group,))
    return RunningJob("job", {0: Rank(record, Process(os.getpid(), "S"))})


def far(**changes: object) -> NodeView:
    return NodeView([THERE], (1, 0.4), [])._replace(**changes)  # type: ignore[arg-type]


def test_a_view_is_read_as_it_was_written_but_for_ranks_that_the_node_does_not_have():
    text = encode(OWN, 1)
    assert decode(text.encode()) == NodeView([HERE], OWN.slow, OWN.troubles)
    assert encode(OWN, 2) != text


@pytest.mark.parametrize(
    "data",
    [
        "{",
        "[1]",
        "[" * 100_000,
        "{}",
        json.dumps({"rows": [], "slow": ["x", "y"], "troubles": []}),
        json.dumps({"rows": [{**HERE._asdict(), "cores": "many"}], "slow": None, "troubles": []}),
        json.dumps({"rows": [{**HERE._asdict(), "more": 1}], "slow": None, "troubles": []}),
        json.dumps({"rows": [{**HERE._asdict(), "memory": [1]}], "slow": None, "troubles": []}),
        json.dumps({"rows": [{"rank": 1}], "slow": None, "troubles": []}),
    ],
)
def test_what_is_no_view_is_refused(data):
    with pytest.raises(ValueError, match=r"no view|no row|Expecting|delimiter|invalid literal"):
        decode(data.encode())


def test_rows_of_others_replace_those_that_say_where_a_rank_is():
    assert merged(OWN, []) == OWN
    view = merged(OWN, [far(troubles=["rank 1 is late", "rank 1 is stopped"])])
    assert view.rows == [HERE, THERE]
    assert view.troubles == ["rank 1 is late", "rank 1 is stopped"]
    assert view.slow == (1, 0.4)  # -1: here nobody is the slowest
    # This machine's launcher answers as well; its own reading is newer.
    again = NodeView([HERE._replace(number=6)], None, [])
    assert merged(OWN, [again]) == OWN


@pytest.fixture
def launchers(monkeypatch):
    """The launchers' store, and a job with a rank on another machine whose launcher has number 0."""
    with TCPStore("127.0.0.1", 0, is_master=True) as store:
        found = (
            f"127.0.0.1:{store.port}",
            {name.encode(): value.encode() for name, value in os.environ.items()},
        )
        monkeypatch.setattr(other_nodes, "launchers_of", lambda pid: found)
        store.add(NODES, 1)
        yield store


def test_it_asks_and_shows_views_until_they_change_no_more(launchers, monkeypatch):
    now = 0.0
    monkeypatch.setattr(other_nodes.time, "monotonic", lambda: now)
    with OtherNodes(job_on_two_hosts()) as others:
        assert others.are_late(others.add_to(OWN))
        launchers.set(view_key(0), encode(OWN._replace(rows=[THERE]), 1))
        asked = int(launchers.get(ASKED))
        view = others.add_to(OWN)
        assert int(launchers.get(ASKED)) == asked + 1
        assert [row.number for row in view.rows] == [7, 6]
        assert not others.are_late(view)
        now = 4.9
        assert others.add_to(OWN) == view
        now = 5.1
        assert others.add_to(OWN) == OWN
        launchers.set(view_key(0), encode(OWN._replace(rows=[THERE]), 2))
        assert others.add_to(OWN) == view
        launchers.set(view_key(0), "no view")
        assert others.add_to(OWN) == OWN
        launchers.delete_key(view_key(0))
        now = 11.0
        assert not others.are_late(others.add_to(OWN))  # after ten seconds it waits no more


def test_a_store_that_is_gone_is_named_and_not_asked_again(launchers):
    with OtherNodes(job_on_two_hosts()) as others:
        launchers.close()
        view = others.add_to(OWN)
        assert view.rows == OWN.rows
        assert "the ranks of other machines are not shown: " in view.troubles[-1]
        assert str(launchers.port) in view.troubles[-1]
        assert others.add_to(OWN) == view
        assert not others.are_late(view)
    with OtherNodes(job_on_two_hosts()) as others:  # it cannot even be opened
        assert "the ranks of other machines are not shown: " in others.add_to(OWN).troubles[-1]


def test_a_node_shows_its_ranks_only_as_long_as_somebody_asks(monkeypatch):
    now = 0.0
    monkeypatch.setattr(node_view.time, "monotonic", lambda: now)
    with TCPStore("127.0.0.1", 0, is_master=True) as store:
        store.set(ASKED, "1")
        asked = node_view._Asked(store)
        assert asked.still()
        now = 4.0
        assert asked.still()
        store.add(ASKED, 1)
        now = 8.0
        assert asked.still()
        of_another_node = node_view._Asked(store)
        assert of_another_node.still()
        now = 13.1
        assert not asked.still()
        assert not of_another_node.still()  # it ends as well, and not only after as long again
        assert store.peek([ASKED]) == [None]  # launchers wait for it again


def test_a_view_says_that_no_launcher_shows_the_ranks_of_other_machines(monkeypatch):
    monkeypatch.setattr(other_nodes, "launchers_of", lambda pid: None)
    with OtherNodes(job_on_two_hosts()) as others:
        view = others.add_to(OWN)
        assert not others.are_late(view)
    assert view.rows == OWN.rows
    told, why = view.troubles
    assert (told, "not shown, because fastcoll's launcher" in why) == ("rank 1 is late", True)
    alone = RunningJob("job", {})
    monkeypatch.setattr(RunningJob, "unseen", lambda self: [])
    with OtherNodes(alone) as others:
        assert others.add_to(OWN) is OWN
