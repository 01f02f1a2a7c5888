"""The study of start-up at scale: its model sends what real ranks send, and its arithmetic holds."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from fastcoll.rendezvous.table import MAX_KEYS_PER_REQUEST

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """bench/startup_model.py."""
    monkeypatch.syspath_prepend(str(BENCH))
    import startup_model

    yield startup_model
    del sys.modules["startup_model"]


def costs(study: ModuleType, **changes: float) -> object:
    names = [field.name for field in dataclasses.fields(study.Costs)]
    plain = dict.fromkeys(names, 0.0) | {
        "server_message": 20e-6,
        "rank_sent": 1000.0,
        "rank_received": 1000.0,
    }
    return study.Costs(**plain | changes)


MEASURE = """
import json, sys
sys.path.insert(0, sys.argv[1])
from startup_crowd import measure
tally = measure(12, processes=2)
print(json.dumps([len(tally.joined), tally.messages]))
"""


@pytest.mark.long
def test_the_model_sends_what_real_ranks_send(study: ModuleType, processes) -> None:
    """Except for looks around, which depend on how long the machine takes."""
    joined, messages = json.loads(processes.outputs([processes.start(MEASURE, BENCH)])[0])
    model = study.Simulation(12, costs(study)).run().messages
    assert joined == 12
    looks = Counter({op: messages.get(op, 0) - model[op] for op in ("GET", "PEEK", "TOLD")})
    assert all(count >= 0 for count in looks.values())
    assert Counter(messages) - looks == model - Counter(PEEK=model["PEEK"])


@pytest.mark.parametrize("size", [1, 2, 3, 8, 100, MAX_KEYS_PER_REQUEST + 1])
def test_every_rank_gets_to_the_end(study: ModuleType, size: int) -> None:
    outcome = study.Simulation(size, costs(study)).run()
    sent = sum(len(study.script(rank, size)) for rank in range(size))
    assert outcome.messages.total() - 2 * outcome.messages["PEEK"] == sent
    assert outcome.server_busy == pytest.approx(20e-6 * outcome.messages.total())


def test_a_busy_server_few_cores_or_the_network_decide(study: ModuleType) -> None:
    outcome = study.Simulation(1000, costs(study)).run()
    assert outcome.server_busy <= outcome.seconds < 1.1 * outcome.server_busy
    machine = study.Machine(cores=2, latency=0.0)
    outcome = study.Simulation(100, costs(study, client_rank=0.01), machine).run()
    assert (100 * 0.01 + outcome.server_busy) / 2 <= outcome.seconds < 100 * 0.01
    machine = study.Machine(latency=0.0, bandwidth=1e6)
    outcome = study.Simulation(50, costs(study, record=100.0), machine).run()
    assert outcome.received == pytest.approx(50 * 1000 + 49 * 50 * 100, rel=1e-3)
    assert outcome.seconds > 49 * 50 * 100 / 1e6


def test_connections_beyond_the_backlog_come_again(
    study: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "BACKLOG", 10)
    outcome = study.Simulation(15, costs(study, server_message=1e-3)).run()
    assert outcome.retried > 0
    assert outcome.seconds > 1.0


def test_costs_are_found_again(study: ModuleType) -> None:
    samples = [
        study.Sample(n, 11 * n, 900.0 * n, 1200.0 * n + 17.0 * n * n, 11 * n * 30e-6, 1e-3 * n + 5e-6 * n * n)
        for n in (100, 200, 400)
    ]
    found = dataclasses.asdict(study.fit(samples, 2e-10))
    expected = {"server_message": 30e-6, "server_byte": 2e-10, "client_rank": 1e-3, "client_record": 5e-6}
    assert found == pytest.approx(expected | {"rank_sent": 900.0, "rank_received": 1200.0, "record": 17.0})


def test_a_cost_is_never_negative(study: ModuleType) -> None:
    samples = [study.Sample(n, n, n, 1000.0 * n - 0.1 * n * n, n, n) for n in (100, 200, 400)]
    found = study.fit(samples, 0.0)
    assert found.record == 0.0
    assert found.rank_received > 0
