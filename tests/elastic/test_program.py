"""The program of the page on elastic jobs, under the launcher, and a larger one on four hosts."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hosts.network import Network
from hosts.nodes import finish, launched, output_of

from elastic.members import expected


@pytest.mark.long
def test_the_program_of_the_page(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "elastic.md").read_text().partition("\n### run\n")[0]
    (block,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    command, *shown = re.findall(r"^(?:\$ python -m fastcoll.*|\[\w.*\] .*)$", page, re.MULTILINE)
    (tmp_path / "program.py").write_text(
        block.replace("epoch < 40", "epoch < 40 or dist.get_world_size() < 4").replace(
            "0.01)  #", "0.002)  #"
        )
    )
    words = command.removeprefix("$ python ").split()
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = re.sub(r"\b\d+ steps", "400 steps", done.stdout)  # more if the joiner is slow
    assert sorted(said.splitlines()) == sorted(shown), done.stderr
    assert re.search(
        r"rank 2 \(pid \d+\) failed: signal SIGKILL \(9\); 3 go on here; joiner 1 of 1 starts", done.stderr
    )


PROGRAM = """
import os, sys, time
import numpy as np
import fastcoll as dist
from fastcoll import elastic

N, BATCH, P = 97, 10, 1_000_003
x = np.arange(N) ** 2

@elastic.run(on_change=lambda old, new: print(f"{old} to {new}", flush=True))
def train(state):
    while state.step < 60 or dist.get_world_size() < 8:
        for mine in state.sampler:
            total = x[mine].sum(keepdims=True)
            if os.environ.get("RANK") in ("0", "5") and state.step == 20 + int(os.environ["RANK"]):
                os.kill(os.getpid(), 9)
            dist.all_reduce(total)
            state.w[:] = (3 * state.w + total) % P
            state.step += 1
            time.sleep(0.005)
            state.commit()

state = elastic.State(w=np.zeros(1, np.int64), step=0, sampler=elastic.Sampler(N, BATCH, seed=5))
train(state)
print("learnt", state.step, state.w[0], dist.get_world_size(), flush=True)
"""


@pytest.mark.long
def test_ranks_are_killed_and_replaced_on_four_hosts(
    join_hosts: Callable[..., Network], tmp_path: Path
) -> None:
    """One of them is rank 0; the first of the others continues as rank 0."""
    (tmp_path / "program.py").write_text(PROGRAM)
    options, env = ["--min_ranks", "1", "--max_restarts", "1"], {"FASTCOLL_SECRET": "of this test"}
    network = join_hosts(4, own_pids=True)
    with launched(network, 2, [str(tmp_path / "program.py")], env, options) as nodes:
        finish(nodes, 240)
        assert [node.code for node in nodes] == [0] * 4, output_of(nodes)
        ends = [line for node in nodes for line in re.findall(r"learnt (.*)", node.out)]
        assert len(ends) == 8, output_of(nodes)
        assert len(set(ends)) == 1, output_of(nodes)
        steps, w, size = map(int, ends[0].split())
        assert (w, size) == (expected(steps), 8), output_of(nodes)
        changes = re.findall(r"\[3\] (\d to \d)", nodes[1].out)
        assert changes[0] == "8 to 7", output_of(nodes)
        assert changes[-1].endswith(" to 8"), output_of(nodes)
