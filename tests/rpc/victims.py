"""Workers of the tests in which one of them dies, stops or is interrupted."""

from __future__ import annotations

import operator
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import programs

import fastcoll
from fastcoll import rpc
from fastcoll.rendezvous.listener import Listener
from fastcoll.rpc.handlers import UNCOUNTED

LIMIT = 100.0  # seconds that only a hang takes
over = threading.Event()
joined = threading.Event()  # set by a worker after its init_rpc, for others to wait for
held = threading.Semaphore(0)


def join(rank: int, n: int, url: str, name: str = "") -> None:
    options = rpc.RpcBackendOptions(init_method=url)
    rpc.init_rpc(name or f"w{rank}", rank=rank, world_size=n, rpc_backend_options=options)


def hold() -> bool:
    held.release()
    return over.wait(LIMIT)


def await_joined() -> bool:
    return joined.wait(LIMIT)


def await_held() -> None:
    assert held.acquire(timeout=LIMIT)


def release_held() -> None:
    held.release()


def end() -> None:
    over.set()


def let(worker: str, *call: Any) -> None:
    """Call a function on a worker, which may leave because of it before it has answered."""
    with suppress(fastcoll.AbortedError):
        rpc.rpc_sync(worker, call[0], args=call[1:])


def let_end(worker: str) -> None:
    let(worker, end)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    """Stop this process. The signal goes to this thread: one to the process could stop it after the answer."""
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def until(what: Callable[[], bool], otherwise: str = "it does not come") -> None:
    programs.until(what, lambda: otherwise, LIMIT)


def await_stopped(pid: int) -> None:
    """Wait until a process that got SIGSTOP has stopped, which takes a while on a busy machine."""
    stat = Path(f"/proc/{pid}/stat")
    until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "it does not stop")


def go_on(pid: int) -> None:
    """Wait until a process has stopped, and let it continue."""
    await_stopped(pid)
    os.kill(pid, signal.SIGCONT)


def interrupt() -> None:
    """Send SIGINT once the main thread waits for an answer: within a message it would close the connection."""
    until(main_thread_waits, "the main thread waits for no answer")
    os.kill(os.getpid(), signal.SIGINT)


def main_thread_waits() -> bool:
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    return (frame.f_globals["__name__"], frame.f_code.co_name) == ("fastcoll.rpc.link", "poll")


def error_of(future: Any) -> tuple[str, str, tuple[int, ...], float]:
    """Return the kind, text and ranks of a future's error, and when it was raised."""
    try:
        future.wait()
    except Exception as error:
        return type(error).__name__, str(error), getattr(error, "ranks", ()), time.monotonic()
    raise AssertionError("no error")


def wait_for_the_end() -> None:
    assert over.wait(LIMIT)
    rpc.shutdown(graceful=False)


def served_by_w1(act: Callable[[], Any]) -> Callable[[int, int, str], Any]:
    """Run a function on w0, and return its result; w1 serves its calls until then."""

    @wraps(act)
    def run(rank: int, n: int, url: str) -> Any:
        join(rank, n, url)
        if rank == 1:
            return wait_for_the_end()
        found = act()
        let_end("w1")
        rpc.shutdown(graceful=False)
        return found

    return run


def one_dies(rank: int, n: int, url: str) -> Any:
    """w1 dies with calls of all others open."""
    join(rank, n, url)
    if rank == 1:
        wait_for_the_end()
    calls = [rpc.rpc_async("w1", hold) for _ in range(3)]
    rpc.rpc_sync("w1", await_held)
    other = f"w{n - 1}" if rank == 0 else "w0"
    rpc.rpc_sync(other, release_held)
    assert held.acquire(timeout=LIMIT)  # all others have calls under way now
    errors = [error_of(calls[0] if rank else rpc.rpc_async("w1", die)), *map(error_of, calls)]
    again = error_of(rpc.rpc_async("w1", hold))
    works = rpc.rpc_sync(other, operator.add, args=(1, 2))
    let_end(other)
    assert over.wait(LIMIT)
    ends: Any = None
    try:
        rpc.shutdown(timeout=LIMIT)
    except fastcoll.PeerDiedError as error:
        ends = str(error)
    until(lambda: threading.active_count() <= 3, "the readers do not end")
    return errors, again, works, ends


@served_by_w1
def one_is_stopped() -> Any:
    """w1 is stopped before w0 first calls it, and again in a call. Return all errors, and the later results."""
    pid = rpc.agent.current_agent().members[1].pid
    os.kill(pid, signal.SIGSTOP)
    await_stopped(pid)
    errors, works = [error_of(rpc.rpc_async("w1", hold, timeout=0.1))], []
    go_on(pid)
    works.append(rpc.rpc_sync("w1", operator.add, args=(1, 2)))
    errors.append(error_of(rpc.rpc_async("w1", stop, timeout=0.1)))
    await_stopped(pid)
    # More than the kernel buffers, twice: one message is stuck, and the other one behind it.
    for large in (bytearray(64 << 20), np.ones(1 << 22)):
        errors += [error_of(rpc.rpc_async("w1", len, args=(large,), timeout=0.1)) for _ in range(2)]
    go_on(pid)
    works.append(rpc.rpc_sync("w1", operator.add, args=(1, 2)))
    return errors, works


def ctrl_c_in_shutdown(rank: int, n: int, url: str) -> Any:
    """w1 is interrupted in shutdown, while w0 waits for a call that w1 serves."""
    join(rank, n, url)
    if rank == 1:
        try:
            joined.set()
            rpc.shutdown()
        except KeyboardInterrupt:
            return "interrupted"
    assert rpc.rpc_sync("w1", await_joined)
    call = rpc.rpc_async("w1", hold)
    rpc.rpc_sync("w1", await_held)
    let("w1", interrupt)
    found = error_of(call)
    rpc.shutdown(graceful=False)
    return found


@served_by_w1
def ctrl_c_in_a_call() -> Any:
    """w0 is interrupted while it waits; its next call works."""
    rpc.rpc_sync("w1", operator.add, args=(1, 2))  # only answers arrive from now on
    interrupter = threading.Thread(target=interrupt)
    try:
        interrupter.start()
        rpc.rpc_sync("w1", hold)
    except KeyboardInterrupt:
        works = rpc.rpc_sync("w1", operator.add, args=(1, 2))
    interrupter.join()
    return works


def one_ends_without_shutdown(rank: int, n: int, url: str) -> Any:
    """w1's program ends by an exception while it serves a call."""
    join(rank, n, url)
    if rank == 1:
        assert held.acquire(timeout=LIMIT)
        return None
    found = error_of(rpc.rpc_async("w1", hold))
    rpc.shutdown(graceful=False)
    return found


def one_leaves_as_it_is_dialed(rank: int, n: int, url: str) -> Any:
    """w0 leaves after w1 has dialed it, before the thread that accepts connections has got a core.

    There is no other connection between them, so w1 gets the exit reason of w0 by this one alone.
    """
    serve, dialed = Listener.serve, threading.Event()
    ready = Path(url.removeprefix("file://")).with_name("ready")

    def serve_late(listener: Listener, data: int, events: int) -> None:
        pending = listener._pending.get(data)
        if pending is not None and pending.answering.theirs is not None:
            dialed.set()
            until(lambda: agent._closed is not None, "it does not leave")
        serve(listener, data, events)

    join(rank, n, url)
    agent = rpc.agent.current_agent()
    if rank == 0:
        Listener.serve = serve_late  # type: ignore[method-assign]
        ready.touch()
        assert dialed.wait(LIMIT)
        rpc.shutdown(graceful=False)
        return "left"
    until(ready.exists)
    found = error_of(rpc.rpc_async("w0", hold))
    rpc.shutdown(graceful=False)
    return found


class Slow:
    """Its destructor takes a while."""

    def __del__(self) -> None:
        time.sleep(0.3)


def one_leaves_slowly(rank: int, n: int, url: str) -> Any:
    """w1 leaves while w0 calls it repeatedly."""
    join(rank, n, url)
    if rank == 1:
        rref = rpc.RRef(Slow())
        wait_for_the_end()
        return rref.owner_name()
    let_end("w1")
    try:
        while True:
            rpc.rpc_sync("w1", rpc.get_worker_info)
    except Exception as error:
        found = type(error).__name__, str(error)
    rpc.shutdown(graceful=False)
    return found


@rpc.functions.async_execution
def never() -> Any:
    held.release()
    return rpc.Future()


def shutdown_waits(rank: int, n: int, url: str, doing: str) -> Any:
    """w1 serves a call that never ends. Return what shutdown raises, and the CPU and wall time that it takes.

    With a timeout of its own, w0 calls shutdown last: it knows the calls of the others once they have called it.
    """
    options = rpc.RpcBackendOptions(init_method=url, rpc_timeout=1.0 if doing == "default" else 60.0)
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=n, rpc_backend_options=options)
    if rank == 0:
        rpc.rpc_sync("w1", os.getpid, timeout=LIMIT)  # after this, calls reach the worker within any timeout
        assert error_of(rpc.rpc_async("w1", never, timeout=0.05))[0] == "RpcTimeoutError"
        rpc.rpc_sync("w1", await_held, timeout=LIMIT)
        for other in range(n):
            rpc.rpc_sync(other, end, timeout=LIMIT)
    assert over.wait(LIMIT)
    if doing == "timeout" and rank == 0:
        await_shutdown_of(n - 1)
    used, began = time.process_time(), time.monotonic()
    error = ended_by(None if doing == "default" else LIMIT if rank else 1.0)
    return *error, time.process_time() - used, time.monotonic() - began


def await_shutdown_of(others: int) -> None:
    """Wait until so many workers wait in shutdown for this worker, worker 0."""
    serving = rpc.agent.current_agent().handlers._under_way
    until(lambda: [kind for _, kind, _ in list(serving.values())].count(UNCOUNTED) == others)


def ended_by(timeout: float | None) -> tuple[str, str]:
    """Return the kind and text of the error of a graceful shutdown."""
    try:
        rpc.shutdown(timeout=timeout)
    except fastcoll.FastcollError as error:
        return type(error).__name__, str(error)
    return "none", ""


def absent(rank: int, n: int, url: str) -> Any:
    """w1 does not call shutdown; w0 waits for 1 s in it, w2 longer."""
    join(rank, n, url)
    if rank == 2:
        return ended_by(LIMIT)
    if rank == 0:
        await_shutdown_of(1)
        return ended_by(1.0)
    error_of(rpc.rpc_async("w0", hold))  # until w0 has left
    rpc.shutdown(graceful=False)
    return "left"


def other_sizes(rank: int, n: int, url: str) -> None:
    join(rank, n + rank, url)


def same_rank(rank: int, n: int, url: str) -> None:
    join(0, n, url, f"w{rank}")
