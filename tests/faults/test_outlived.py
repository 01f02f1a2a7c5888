"""A rank leaves or dies: ranks that no longer need it complete their calls, ranks that wait for it get the reason."""

from __future__ import annotations

import os
import re
import select
from pathlib import Path

import numpy as np
import pytest
from programs import python, until

import fastcoll as dist
from fastcoll import ReduceOp
from fastcoll.record.record import read


def dawdle(a, b):
    for _ in range(400):
        a = a + b / (a + 1)
    return a


def finish_early(rank, dies):
    """Rank 1 arrives late and finishes long before rank 0, which checks its peers several times meanwhile."""
    op = ReduceOp.custom(dawdle)
    dist.reduce(np.ones(8), 0, op)
    group = dist.new_group()
    group.barrier()
    x, first = np.ones(8 * 32_768), group.monitor.members[0].pid
    if rank == 1:
        until(lambda: any(each.late == 1 for each in read(first).groups))
    group.reduce(x, 0, op)
    if rank == 1 and dies:
        os._exit(0)
    group.close()
    assert np.isfinite(x).all()
    assert ((x == 1) == (rank == 1)).all()


@pytest.mark.ranks(2)
def test_a_rank_may_leave_when_its_part_is_done(rank):
    finish_early(rank, dies=False)


@pytest.mark.long
@pytest.mark.ranks(2, fresh=True, may_die=(1,))
def test_a_rank_may_die_when_its_part_is_done(rank):
    finish_early(rank, dies=True)


TRAIN = """
import contextlib, json, os, sys
import numpy as np
import fastcoll as dist
from fastcoll.job import backends

backend, store = sys.argv[1:]
backends.load(backends.parse_backend(backend))  # once for all ranks
rank = next((rank for rank in range(1, 7) if os.fork() == 0), 0)
dist.init_process_group(backend, f"file://{store}", timeout=60, rank=rank, world_size=7)
groups = [dist.new_group([0, peer]) for peer in range(1, 7)]
last = dist.new_group([0, 1])
with contextlib.suppress(dist.PeerDiedError):  # rank 5 may be out, and gone, before others are out
    dist.barrier()

def load(line):
    raise ValueError("bad data")

if rank == 1:
    json.loads("{")
elif rank == 2:
    try:
        load(88)
    finally:
        dist.destroy_process_group()
elif rank == 3:
    sys.exit(0)
elif rank == 4:
    try:
        load(88)
    except ValueError:
        sys.exit(3)
    finally:
        dist.destroy_process_group()
elif rank == 5:
    os._exit(0)
elif rank == 6:
    dist.barrier(groups[5], device_ids=[0])
else:
    calls = [group.barrier for group in groups]
    calls += [lambda: last.recv(np.ones(1), 1), lambda: dist.new_group([0, 1]), dist.barrier]
    for call in calls:
        try:
            call()
        except dist.FastcollError as error:
            print(type(error).__name__, *getattr(error, "ranks", ()), error)
"""


def line_of(text: str) -> int:
    """Return the number of the line that has this text."""
    return next(number for number, line in enumerate(TRAIN.splitlines(), 1) if text in line)


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_ranks_that_wait_for_a_rank_that_left_get_the_reason(tmp_path: Path, backend: str) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    done = python(tmp_path / "train.py", backend, tmp_path / "meet")
    data, asked = line_of('raise ValueError("bad data")'), line_of("json.loads")
    parsing = rf"left: JSONDecodeError: .+ \(train\.py:{asked}\)"
    wanted = [
        rf"AbortedError 1 rank 1 \(.+\) {parsing}; (barrier\(\)|making a data connection)",
        rf"AbortedError 2 rank 2 \(.+\) left: ValueError: bad data \(train\.py:{data}\); ",
        r"AbortedError 3 rank 3 \(.+\) left \(its program ended\); ",
        rf"AbortedError 4 rank 4 \(.+\) left: ValueError: bad data \(train\.py:{data}\); ",
        r"PeerDiedError 5 rank 5 \(.+\) died",
        r"(AbortedError 6 rank 6|MismatchError rank 6's barrier was refused).*: UsageError: device_ids is \[0\]",
        rf"AbortedError 1 rank 1 \(.+\) {parsing}; recv from rank 1",
        rf"AbortedError 1 new_group\(\[0, 1\]\): rank 1 \(.+\) {parsing}",
        r"PeerDiedError 5 rank 5 ",
    ]
    lines = done.stdout.splitlines()
    assert len(lines) == len(wanted), (done.stdout, done.stderr)
    for line, pattern in zip(lines, wanted, strict=True):
        assert re.match(pattern, line), (line, pattern)


@pytest.mark.long
@pytest.mark.ranks(2, backend="tcp", fresh=True, may_die=(1,))
@pytest.mark.parametrize("count", [8, 1 << 21])
@pytest.mark.parametrize("case", ["alone", "more behind", "looked at late", "while it sends"])
def test_a_rank_may_end_at_once_after_its_last_receive(rank, world_size, case, count):
    """The sender's part is complete, in whatever order it gets the ack and the end of the connection."""
    x, large = np.full(count, 7, "u1"), np.full(64 << 20, 1 + rank, "u1")
    dist.barrier()
    if rank == 1:
        sent = dist.isend(large, 0, tag=9) if case == "while it sends" else None
        got = np.zeros(count, "u1")
        dist.recv(got, 0)
        os._exit(0 if (got == 7).all() and not (sent and sent.is_completed()) else 3)
    whole = np.zeros_like(large)
    peer = os.pidfd_open(dist.group.WORLD.monitor.members[1].pid)
    work = dist.isend(x, 1)
    behind = [dist.isend(x, 1, tag=5) for _ in range(3 * (case == "more behind"))]
    if case == "looked at late":
        select.select([peer], [], [])  # until the other process has ended
    os.close(peer)
    if case == "while it sends":
        behind = [dist.irecv(whole, 1, tag=9)]
    work.wait()
    for other in behind:
        try:
            other.wait()
        except dist.PeerDiedError:
            continue
        # All of it had been sent; the sender died before it got the ack.
        assert case == "while it sends"
        assert (whole == 2).all()
