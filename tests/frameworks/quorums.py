"""Two processes in torchft's process group on fastcoll: new quorums, an abort between two, a death."""

from __future__ import annotations

import os
import sys
import threading
from datetime import timedelta

import pytest
import torch
import torch.multiprocessing as mp
from torch import distributed as dist
from torchft import process_group

from fastcoll.errors import AbortedError, PeerDiedError
from fastcoll.job.groups import groups
from fastcoll.torchft import ProcessGroupFastcoll


def total(group: ProcessGroupFastcoll, rank: int) -> float:
    x = torch.full((4,), rank + 1.0)
    work = group.allreduce([x], dist.distributed_c10d.AllreduceOptions())
    work.wait()
    work.get_future().wait()  # torchft's Manager uses this future
    return x[0].item()


def join(group: ProcessGroupFastcoll, port: int, quorum: str, rank: int, size: int) -> None:
    address = f"localhost:{port}/{quorum}"
    if hasattr(group, "configure"):  # torchft 0.2
        group.configure(address, str(rank), rank, size)
    else:
        group.set_rank_info(str(rank), 0, 1, rank)
        process_group.reconfigure_with_store(group, address, rank, size)


def run(rank: int, port: int) -> None:
    torch.set_num_threads(1)
    group = ProcessGroupFastcoll(timeout=timedelta(seconds=120))
    for quorum in ("one", "two"):
        join(group, port, quorum, rank, 2)
        assert (group.size(), group.getBackendName()) == (2, "torchft-fastcoll")
        assert total(group, rank) == 3
    if rank == 0:
        call = Stuck(group.parent)
        group.abort()
        call.join()
        assert isinstance(call.error, AbortedError), call.error
        join(group, port, "alone", 0, 1)
        assert total(group, 0) == 1
    join(group, port, "three", rank, 2)
    assert total(group, rank) == 3
    if rank == 1:
        os._exit(0)
    with pytest.raises(PeerDiedError, match=r"rank 1 .* died"):
        total(group, rank)
    assert isinstance(group.errored(), PeerDiedError)
    group.shutdown()
    group.shutdown()
    assert not groups.standalone
    sys.stdout.write("quorums did it\n")


class Stuck(threading.Thread):
    """A thread in a call that the other rank does not make."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, self.error = group, None
        self.start()

    def run(self) -> None:
        try:
            self.group.barrier().wait()
        except Exception as error:
            self.error = error


if __name__ == "__main__":
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    processes = [mp.get_context("spawn").Process(target=run, args=(rank, store.port)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(sum(process.exitcode for process in processes))
