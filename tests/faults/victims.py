"""The programs of ranks in the tests of this folder: they work until one of them dies, and report how it ended."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import fastcoll as dist
from fastcoll import GroupError

Step = Callable[[int, int, int], None]


def _blocks(count: int, n: int, rank: int) -> list[np.ndarray]:
    return [np.full(count, float(rank), "f4") for _ in range(n)]


def _ring(count: int, rank: int, n: int) -> None:
    """Send to the next rank and receive from the previous one."""
    x, y = np.ones(count, "f4"), np.zeros(count, "f4")
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x, (rank + 1) % n), dist.P2POp(dist.irecv, y, (rank - 1) % n)]
    ):
        work.wait()


def _await_token(count: int, rank: int, n: int) -> None:
    """Pass a token around once, from rank 0, which posts its receive before the token can arrive."""
    x, y = np.ones(count, "f4"), np.zeros(count, "f4")
    receive = dist.irecv(y, (rank - 1) % n)
    if rank:
        receive.wait()
    dist.isend(x, (rank + 1) % n).wait()
    receive.wait()


def _pass_on(count: int, rank: int, n: int) -> None:
    """Pass a token around once, by blocking calls."""
    x = np.ones(count, "f4")
    if rank:
        dist.recv(x, rank - 1)
    dist.send(x, (rank + 1) % n)
    if not rank:
        dist.recv(x, n - 1)


def _put_on(count: int, rank: int, n: int) -> None:
    """Allocate a symmetric array, and put into that of the next rank."""
    x = dist.symmetric.empty(count, "f4")
    dist.symmetric.put(x, np.ones(count, "f4"), (rank + 1) % n)
    dist.symmetric.signal(x, (rank + 1) % n)
    dist.symmetric.wait(x, (rank - 1) % n)


_symmetric: dict[int, np.ndarray] = {}


def _reduce_symmetric(count: int, rank: int, n: int) -> None:
    if count not in _symmetric:
        _symmetric[count] = dist.symmetric.zeros(count, "f4")
    dist.all_reduce(_symmetric[count])


STEPS: dict[str, Step] = {
    "all_reduce": lambda c, r, n: dist.all_reduce(np.ones(c, "f4")),
    "all_reduce as int8": lambda c, r, n: dist.all_reduce(np.ones(c, "f4"), travel="int8"),
    "reduce": lambda c, r, n: dist.reduce(np.ones(c, "f4"), 0),
    "scan": lambda c, r, n: dist.scan(np.ones(c, "f4")),
    "reduce_scatter": lambda c, r, n: dist.reduce_scatter(np.ones(c, "f4"), _blocks(c, n, r)),
    "broadcast": lambda c, r, n: dist.broadcast(np.ones(c, "f4"), 0),
    "all_gather": lambda c, r, n: dist.all_gather(_blocks(c, n, r), np.ones(c, "f4")),
    "gather": lambda c, r, n: dist.gather(np.ones(c, "f4"), _blocks(c, n, r) if r == 0 else None, 0),
    "scatter": lambda c, r, n: dist.scatter(np.ones(c, "f4"), _blocks(c, n, r) if r == 0 else None, 0),
    "all_to_all": lambda c, r, n: dist.all_to_all(_blocks(c, n, r), _blocks(c, n, r)),
    "barrier": lambda c, r, n: dist.barrier(),
    "batch_isend_irecv": _ring,
    "irecv": _await_token,
    "send_recv": _pass_on,
    "put": _put_on,
    "symmetric_all_reduce": _reduce_symmetric,
}


def report_of(error: GroupError) -> dict[str, Any]:
    """Return what a rank reports of an error."""
    return {"kind": type(error).__name__, "error": str(error), "ranks": error.ranks}


def pid_of(rank: int) -> int:
    """Return the process id of a rank of the world."""
    return dist.group.WORLD.monitor.members[rank].pid  # type: ignore[union-attr]


def wait_for_late_rank(rank: int, n: int, url: str, timeout: float, backend: str = "auto") -> dict[str, Any]:
    """Wait in all_reduce on all ranks but the last, which does not call before the others have given up."""
    dist.init_process_group(backend, init_method=url, rank=rank, world_size=n, timeout=60)
    group = dist.new_group(timeout=60)
    group.barrier()  # the waiting ranks begin at about the same time
    group.timeout = timeout  # set here, because joining may take longer
    given_up = [Path(f"{url.removeprefix('file://')}-given-up-{other}") for other in range(n - 1)]
    try:
        if rank == n - 1:
            while not all(path.exists() for path in given_up):
                time.sleep(0.01)
            return {}
        group.all_reduce(np.ones(3))
    except GroupError as error:
        given_up[rank].touch()
        return report_of(error)
    finally:
        dist.destroy_process_group()
    raise AssertionError("no rank was late")


def stop_and_continue(rank: int, n: int, url: str, seconds: float, backend: str = "auto") -> float:
    """Have its peer stop rank 0 for a while, as a debugger or the kernel would; return the result."""
    dist.init_process_group(backend, init_method=url, rank=rank, world_size=n, timeout=60)
    if rank == 1:
        os.kill(pid_of(0), signal.SIGSTOP)
        threading.Timer(seconds, os.kill, (pid_of(0), signal.SIGCONT)).start()
    x = np.ones(3)
    dist.all_reduce(x)
    dist.destroy_process_group()
    return float(x[0])


def interrupt_in_the_package() -> list[float]:
    """Send SIGINT to the main thread once it is in a function of the package; return the time.

    It usually waits by then. If it does not yet, the call must end as well.
    """
    main, package, sent = threading.get_ident(), os.path.dirname(dist.__file__), list[float]()

    def is_there() -> bool:
        stack = traceback.walk_stack(sys._current_frames()[main])
        return any(frame.f_code.co_filename.startswith(package) for frame, _ in stack)

    def send() -> None:
        while not is_there():
            time.sleep(0.01)
        time.sleep(0.2)
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=send, daemon=True).start()
    return sent


def interrupt(rank: int, n: int, url: str, call: str, backend: str = "auto") -> dict[str, Any]:
    """Send rank 0 SIGINT while it waits for the others, whose group then fails."""
    dist.init_process_group(backend, init_method=url, rank=rank, world_size=n, timeout=60)
    x, interrupted = np.ones(3), Path(url.removeprefix("file://") + "-interrupted")
    waiting = {
        "all_reduce": lambda: dist.all_reduce(x),
        "recv": lambda: dist.recv(x, 1),
        "send": lambda: dist.send(x, 1),
        "work": lambda: dist.all_reduce(x, async_op=True).wait(),
        "destroy": lambda: (dist.all_reduce(x, async_op=True), dist.destroy_process_group()),
    }
    if rank == 0:
        sent = interrupt_in_the_package()
        try:
            waiting[call]()
        except KeyboardInterrupt:
            interrupted.touch()
            return {"after": time.monotonic() - sent[0]}
        raise AssertionError("no KeyboardInterrupt")
    while not interrupted.exists():
        time.sleep(0.01)
    try:
        for _ in range(3):  # rank 0 had published its part of the first call, so that call may succeed
            dist.all_reduce(x)
    except GroupError as error:
        return {"error": str(error)}
    return {"error": ""}


def make_world(rank: int, n: int, url: str) -> str:
    """Start and use a job; return the error."""
    try:
        dist.init_process_group(init_method=url, rank=rank, world_size=n, timeout=60)
        x = np.ones(100_000)
        dist.all_reduce(x)
        assert (x == n).all()
        dist.destroy_process_group()
    except dist.ResourceError as error:
        return str(error)
    return ""


def _long_waits() -> dict[str, Callable[[], Any]]:
    x = np.ones(5, "f4")
    return {
        "barrier": dist.barrier,
        "all_reduce": lambda: dist.all_reduce(x),
        "recv": lambda: dist.recv(x, 0),
        "recv from any": lambda: dist.recv(x),
        "irecv": lambda: dist.irecv(x, 0).wait(),
        "Work.wait": lambda: dist.all_reduce(x, async_op=True).wait(),
    }


LONG_WAITS = tuple(_long_waits())


def _cpu_seconds(pid: int) -> float:
    """Return the CPU time of all threads of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wait_for_long(rank: int, n: int, url: str, what: str) -> float:
    """Wait on rank 1; return on rank 0 the share of a core that the wait uses after its first second."""
    dist.init_process_group(init_method=url, rank=rank, world_size=n, timeout=60)
    wait, share = _long_waits()[what], 0.0
    if rank == 0:
        time.sleep(1.3)  # after the other rank has begun to wait
        began, used = time.monotonic(), _cpu_seconds(pid_of(1))
        time.sleep(0.5)
        used = _cpu_seconds(pid_of(1)) - used
        share = used / (time.monotonic() - began)
    if rank == 0 and "recv" in what:
        dist.send(np.ones(5, "f4"), 1)
    else:
        wait()
    dist.destroy_process_group()
    return share
