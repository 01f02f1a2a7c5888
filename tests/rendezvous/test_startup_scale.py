"""Start-up at scale: the model sends the same messages as real ranks, and its arithmetic holds."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path

import pytest
from rendezvous import startup_model
from rendezvous.startup_model import Costs, Machine, Simulation, script

from fastcoll.store.table import MAX_KEYS_PER_REQUEST


def costs(**changes: float) -> Costs:
    names = [field.name for field in dataclasses.fields(Costs)]
    plain = dict.fromkeys(names, 0.0) | {
        "server_message": 20e-6,
        "rank_sent": 1000.0,
        "rank_received": 1000.0,
    }
    return Costs(**plain | changes)


MEASURE = """
import json, sys
sys.path.insert(0, sys.argv[1])
from rendezvous.startup_crowd import measure
tally = measure(12, processes=2)
print(json.dumps([len(tally.joined), tally.messages]))
"""


@pytest.mark.long
def test_the_model_sends_what_real_ranks_send(processes) -> None:
    """Except for polls, whose number depends on the machine's speed."""
    joined, messages = json.loads(processes.outputs([processes.start(MEASURE, Path(__file__).parents[1])])[0])
    model = Simulation(12, costs()).run().messages
    assert joined == 12
    looks = Counter({op: messages.get(op, 0) - model[op] for op in ("GET", "PEEK", "MISSING")})
    assert all(count >= 0 for count in looks.values())
    assert Counter(messages) - looks == model - Counter(PEEK=model["PEEK"])


@pytest.mark.parametrize("size", [1, 2, 3, 8, 100, MAX_KEYS_PER_REQUEST + 1])
def test_every_simulated_rank_finishes(size: int) -> None:
    outcome = Simulation(size, costs()).run()
    sent = sum(len(script(rank, size)) for rank in range(size))
    assert outcome.messages.total() - 2 * outcome.messages["PEEK"] == sent
    assert outcome.server_busy == pytest.approx(20e-6 * outcome.messages.total())


def test_the_server_the_cores_or_the_network_is_the_bottleneck() -> None:
    outcome = Simulation(1000, costs()).run()
    assert outcome.server_busy <= outcome.seconds < 1.1 * outcome.server_busy
    machine = Machine(cores=2, latency=0.0)
    outcome = Simulation(100, costs(client_rank=0.01), machine).run()
    assert (100 * 0.01 + outcome.server_busy) / 2 <= outcome.seconds < 100 * 0.01
    machine = Machine(latency=0.0, bandwidth=1e6)
    outcome = Simulation(50, costs(record=100.0), machine).run()
    assert outcome.received == pytest.approx(50 * 1000 + 49 * 50 * 100, rel=1e-3)
    assert outcome.seconds > 49 * 50 * 100 / 1e6


def test_connections_beyond_the_backlog_are_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup_model, "BACKLOG", 10)
    outcome = Simulation(15, costs(server_message=1e-3)).run()
    assert outcome.retried > 0
    assert outcome.seconds > 1.0
