"""Elastic training with real processes that die and join: the result is that of an undisturbed run."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from faults import crew

import fastcoll as dist
from elastic.crowd import Crowd
from elastic.members import LONG, SHORT, Course, expected
from fastcoll import UsageError, config, elastic
from fastcoll.elastic import growth, training
from fastcoll.errors import StoreTimeoutError

STEPS = 30  # of three epochs
UNTIL_ENOUGH = Course(epochs=10**9, seconds=0.001)


def check(outcome: crew.Outcome, steps: int | None = None) -> dict[str, Any]:
    """Check that a member finished with the expected result and left nothing behind."""
    assert outcome.result is not None, outcome.error
    result: dict[str, Any] = outcome.result
    assert steps is None or result["step"] == steps
    assert result["w"] == expected(result["step"]), result
    assert result["rate"] == result["size"], result
    assert result["left"] == [], result
    return result


def finish(crowd: Crowd, numbers: Iterable[int], size: int) -> list[dict[str, Any]]:
    """Have the training end, and return the results of these members, which must be one world of this size."""
    crowd.store.set("enough", "")
    results = [check(crowd.end_of(number)) for number in numbers]
    assert {result["size"] for result in results} == {size}
    assert len({result["step"] for result in results}) == 1
    return results


@pytest.mark.parametrize("backend", ["shm", "tcp", "auto"])
def test_ranks_die_until_one_is_left(backend: str) -> None:
    die = {(3, 4): (1, "kill"), (11, 3): (0, "kill"), (12, 2): (1, "kill")}
    with crew.nothing_left(), Crowd() as crowd:
        nodes = {f"rank{rank}": Course(backend=backend, die=die, node=rank // 2) for rank in range(4)}
        crowd.begin(4, Course(backend=backend, die=die), **(nodes if backend == "auto" else {}))
        ends = crowd.ends()
    assert [end.exitcode for end in ends] == [-9, -9, 0, -9]
    result = check(ends[2], STEPS)
    assert result["changes"] == [(4, 3), (3, 2), (2, 1)]
    assert result["turns"] == [(0, 2, 4), (3, 1, 3), (11, 0, 2), (12, 0, 1)]


def test_what_a_change_sets_survives_a_death_before_the_next_commit() -> None:
    with crew.nothing_left(), Crowd() as crowd:
        crowd.begin(3, Course(die={(3, 3): (2, "kill"), (3, 2): (1, "kill")}))
        result = check(crowd.end_of(0), STEPS)
    assert (result["changes"], result["rate"]) == ([(3, 2), (2, 1)], 1)


def test_a_commit_in_on_change_before_a_death_in_it_counts() -> None:
    with crew.nothing_left(), Crowd() as crowd:
        crowd.begin(3, Course(die={(3, 3): (2, "kill"), (-1, 2): (1, "kill")}))
        result = check(crowd.end_of(0), STEPS)
    assert (result["changes"], result["rate"]) == ([(3, 2), (2, 1)], 1)


@pytest.mark.parametrize("backend", ["shm", "tcp", "auto"])
def test_one_grows_to_four(backend: str) -> None:
    course = replace(UNTIL_ENOUGH, options={"max_ranks": 4}, backend=backend)
    with crew.nothing_left(), Crowd() as crowd:
        crowd.begin(1, replace(course, node=0 if backend == "auto" else None))
        for number in range(1, 6):
            crowd.joiner(replace(course, node=number % 2 if backend == "auto" else None))
        crowd.await_size(4)
        crowd.store.set("enough", "")
        ends = crowd.ends()
    results = [check(end) for end in ends if end.result is not None]
    assert [result["size"] for result in results] == [4] * 4
    changes = results[0]["changes"]
    assert (changes[0][0], changes[-1][1]) == (1, 4)
    late = [end.error for end in ends if end.result is None]
    assert ["the job has ended before this joiner could join it" in error for error in late] == [True] * 2


@pytest.mark.long
@pytest.mark.parametrize(("backend", "times"), [("auto", 12), ("shm", 18)])
def test_killed_and_replaced_again_and_again(backend: str, times: int) -> None:
    dice, course = random.Random(times), replace(UNTIL_ENOUGH, options={"max_ranks": 4}, backend=backend)
    with crew.nothing_left(), Crowd() as crowd:
        alive = crowd.begin(4, course)
        for _ in range(times):
            for number in alive:
                crowd.has_joined(number)
            crowd.kill(alive.pop(dice.randrange(4)))
            alive.append(crowd.joiner(course))
        crowd.has_joined(alive[-1])
        finish(crowd, alive, 4)


@pytest.mark.parametrize(
    ("options", "victim", "texts"),
    [
        ({"min_ranks": 2}, 1, ["rank 1 (pid ", "; 1 rank is left, and min_ranks is 2"]),
        ({"max_restarts": 1}, 0, ["rank 0 (pid ", "(after 1 restarts, the most)"]),
    ],
)
def test_too_few_are_left_or_too_many_have_died(
    options: dict[str, int], victim: int, texts: list[str]
) -> None:
    """The job survives the first death; the second, of one of two, ends the rank that is left."""
    with Crowd() as crowd:
        crowd.begin(3, Course(options, die={(3, 3): (2, "kill"), (5, 2): (victim, "kill")}))
        ends = crowd.ends()
    end = ends[1 - victim]
    assert (ends[victim].exitcode, end.kinds[0]) == (-9, "PeerDiedError")
    assert all(text in end.error for text in texts), end.error


@pytest.mark.parametrize(("how", "text"), [("raise", "ValueError"), ("interrupt", "KeyboardInterrupt")])
def test_an_error_of_the_program_ends_its_rank_alone(how: str, text: str) -> None:
    with crew.nothing_left(), Crowd() as crowd:
        crowd.begin(3, Course(die={(7, 3): (0, how)}))
        first, *others = crowd.ends()
    assert text in (first.error or first.result["error"])
    assert first.result is None or first.result["left"] == []
    for end in others:
        assert check(end, STEPS)["changes"] == [(3, 2)]


MOMENTS = {
    "before_inviting": "fastcoll.job.joining:JoinQueue.invite",
    "before_joining": "fastcoll.elastic.growth:join",
    "before_the_barrier": "fastcoll.elastic.growth:passes_barrier",
    "before_deciding": "fastcoll.job.joining:JoinQueue.decide",
    "before_moving": "fastcoll.elastic.growth:replace_job",
    "before_the_sync": "fastcoll.elastic.training:all_gather_single",
    "in_the_sync": "fastcoll.elastic.state:broadcast",
}


@pytest.mark.long
@pytest.mark.parametrize("backend", ["shm", "tcp"])
@pytest.mark.parametrize(
    ("moment", "rank"), [*((moment, 0) for moment in MOMENTS), *((moment, 2) for moment in list(MOMENTS)[1:])]
)
def test_a_rank_dies_while_joiners_are_admitted(moment: str, rank: int, backend: str) -> None:
    """All other ranks and the joiners form one world."""
    # If no process can see that it is dead, the attempt ends at its timeout.
    forming = SHORT if backend == "tcp" else LONG
    course = replace(UNTIL_ENOUGH, backend=backend, apart=backend == "tcp", forming=forming)
    at = MOMENTS[moment], "kill", 2 if "sync" in moment else 1
    with crew.nothing_left(), Crowd() as crowd:
        crowd.begin(3, course, **{f"rank{rank}": replace(course, at=at)})
        for number in [crowd.joiner(course) for _ in range(2)]:
            crowd.has_joined(number)
        assert crowd.end_of(rank).exitcode == -9
        crowd.await_size(4)
        finish(crowd, {*range(5)} - {rank}, 4)


HANGS = ("fastcoll.job.joining:fetch_for", "fastcoll.job.world:join", "fastcoll.job.joining:passes_barrier")


@pytest.mark.long
@pytest.mark.parametrize(
    ("place", "how"),
    [
        *((place, how) for place in HANGS for how in ("kill", "stop")),
        ("fastcoll.elastic.state:broadcast_object_list", "kill"),
    ],
)
def test_a_joiner_that_dies_or_hangs_costs_a_moment(place: str, how: str) -> None:
    course = replace(UNTIL_ENOUGH, forming=SHORT if how == "stop" else LONG)
    with crew.nothing_left(), Crowd() as crowd:
        crowd.begin(2, course)
        bad = crowd.joiner(replace(course, at=(place, how, 1)))
        crowd.has_joined(0)
        good = crowd.joiner(course)
        crowd.has_joined(good)
        crowd.await_size(3)
        crowd.kill(bad)
        finish(crowd, (0, 1, good), 3)


def test_joiners_that_are_left_without_the_state_raise() -> None:
    with crew.nothing_left(), Crowd() as crowd:
        crowd.begin(1, Course(epochs=10**9, at=("fastcoll.elastic.state:State.sync", "kill", 2)))
        crowd.joiner(Course())
        ends = crowd.ends()
    assert ends[0].exitcode == -9
    assert ends[1].result is None
    assert "the state is lost: every rank that had it has died" in ends[1].error


@pytest.mark.parametrize(
    ("runs", "early", "text"),
    [(0, True, "MismatchError"), (1, False, "these are in run 1 of their program, and not in run 2")],
)
def test_a_joiner_at_another_point_of_its_program_leaves(runs: int, early: bool, text: str) -> None:
    course = replace(UNTIL_ENOUGH, options={"max_restarts": 0}, runs=runs)  # it counts as no restart
    with crew.nothing_left(), Crowd() as crowd:
        crowd.begin(2, course)
        crowd.has_joined(0)
        assert text in crowd.end_of(crowd.joiner(replace(course, runs=0, early=early))).error
        crowd.await_size(2)
        finish(crowd, (0, 1), 2)


def test_a_joiner_that_cannot_load_the_state_leaves() -> None:
    course = replace(UNTIL_ENOUGH, options={"max_restarts": 0})
    unfit = replace(course, at=("fastcoll.elastic.sampler:Sampler.load_state_dict", "raise", 1))
    with crew.nothing_left(), Crowd() as crowd:
        crowd.begin(2, course)
        crowd.has_joined(0)
        assert "the data has a hole" in crowd.end_of(crowd.joiner(unfit)).error
        crowd.await_size(2)
        assert [result["changes"] for result in finish(crowd, (0, 1), 2)] == [[], []]


def test_a_joiner_takes_part_in_later_runs() -> None:
    course = replace(UNTIL_ENOUGH, later=2)
    with crew.nothing_left(), Crowd() as crowd:
        members = [*crowd.begin(1, course), crowd.joiner(course)]
        assert crowd.has_joined(members[1]) == 2
        finish(crowd, members, 2)


def test_a_death_between_two_runs_is_a_change() -> None:
    course = Course(runs=1)
    with crew.nothing_left(), Crowd() as crowd:
        crowd.begin(2, course, rank1=replace(course, at=("fastcoll.elastic.training:_Run.run", "kill", 2)))
        assert check(crowd.end_of(0), STEPS)["changes"] == [(2, 1)]


def test_a_refused_joiner_keeps_no_other_out() -> None:
    course = replace(UNTIL_ENOUGH, node=0)
    with crew.nothing_left(), Crowd() as crowd:
        good = [crowd.joiner(course) for _ in range(2)]
        unfit = crowd.joiner(replace(course, node=1))
        first = crowd.begin(1, course)
        for number in good:
            crowd.has_joined(number)
        assert "'shm' works inside one node" in crowd.end_of(unfit).error
        finish(crowd, first + good, 3)


class Waiting:
    """A join queue with three joiners that are always ready."""

    def __init__(self, *_: object) -> None: ...

    def open(self) -> None: ...

    shut = close = open

    def ready(self) -> tuple[list[int], bool]:
        return [7, 8, 9], False

    def next_attempt(self) -> int:
        return 1


def test_after_a_failed_attempt_joiners_are_admitted_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a joiner that is refused could keep out the joiners beside it, again and again."""
    offered: list[list[int]] = []

    def grow(join_queue: Waiting, attempt: growth.Attempt) -> None:
        offered.append([*attempt.joiners])
        if len(offered) == 1:
            raise growth.NotGrownError("one of them does not fit")

    for name, value in {"JoinQueue": Waiting, "grow": grow, "_LOOK_SECONDS": 0.0}.items():
        monkeypatch.setattr(training, name, value)

    @elastic.run(store="nowhere:1")
    def train(state: Any) -> None:
        while len(offered) < 3:
            state.commit()

    train(elastic.State(step=0))
    dist.destroy_process_group()
    assert offered == [[7, 8, 9], [7], [7, 8, 9]]


def test_a_queue_that_could_not_be_opened_is_opened_at_the_next_commit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An earlier run has shut it, and joiners take a shut queue for the job's end."""
    calls: list[str] = []

    class Slow(Waiting):
        def open(self) -> None:
            calls.append("open")
            if calls == ["open"]:
                raise StoreTimeoutError("the store is slow")

        def close(self) -> None:
            calls.append("close")

        def ready(self) -> tuple[list[int], bool]:
            calls.append("ready")
            return [], False

    monkeypatch.setattr(training, "JoinQueue", Slow)

    @elastic.run(store="nowhere:1")
    def train(state: Any) -> None:
        state.commit()

    train(elastic.State(step=0))
    dist.destroy_process_group()
    assert calls == ["open", "close", "open", "ready", "close"]


def test_the_store_as_an_argument() -> None:
    with crew.nothing_left(), Crowd() as crowd:
        options = {"store": f"127.0.0.1:{crowd.store.port}"}
        course = replace(UNTIL_ENOUGH, options=options, backend="auto")
        members = [*crowd.begin(1, course), crowd.joiner(course)]
        assert crowd.has_joined(members[1]) == 2
        finish(crowd, members, 2)


def test_one_process_alone() -> None:
    state: Any = elastic.State(step=0)

    @elastic.run
    def train(state: Any, last: int, *, by: int) -> int:
        while state.step < last:
            state.step += by
            state.commit()
        return dist.get_world_size()

    assert train(state, 4, by=2) == 1
    assert state.step == 4
    assert train.__name__ == "train"
    with pytest.raises(UsageError, match="min_ranks is 2, and there are 1"):
        elastic.run(train, min_ranks=2)(state, 0, by=1)
    assert not dist.is_initialized()


def test_wrong_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ({"min_ranks": 0}, {"min_ranks": 3, "max_ranks": 2}, {"max_ranks": 0}, {"max_restarts": -1}):
        with pytest.raises(UsageError, match="give 1 <= min_ranks <= max_ranks, and 0 restarts or more"):
            elastic.run(**wrong)  # type: ignore[call-overload]
    with pytest.raises(UsageError, match="on_change is 3; give a function of two numbers of ranks"):
        elastic.run(on_change=3)  # type: ignore[call-overload]
    with pytest.raises(UsageError, match="store is 29400; give HOST:PORT"):
        elastic.run(store=29400)  # type: ignore[call-overload]
    with pytest.raises(UsageError, match="train is 2; give a function of a state"):
        elastic.run(2)  # type: ignore[call-overload]
    with pytest.raises(UsageError, match=r"state is a dict; give a fastcoll\.elastic\.State"):
        elastic.run(lambda state: None)({})
    monkeypatch.setenv("FASTCOLL_JOINER", "1")
    config.forget()
    try:
        for call in (dist.init_process_group, lambda: elastic.run(lambda state: None)(elastic.State())):
            with pytest.raises(UsageError, match=r"store \(FASTCOLL_ELASTIC\) is at HOST:PORT, got ''"):
                call()
    finally:
        monkeypatch.undo()
        config.forget()


def test_without_the_store_no_joiner_is_admitted_and_the_job_goes_on() -> None:
    with crew.nothing_left(), Crowd() as crowd:
        crowd.begin(3, Course(die={(20, 3): (1, "outlive")}))
        for number in range(3):
            crowd.has_joined(number)
        crowd.lose_store()
        results = [check(end, STEPS) for end in crowd.ends() if end.rank != 1]
    assert [result["changes"] for result in results] == [[(3, 2)]] * 2
