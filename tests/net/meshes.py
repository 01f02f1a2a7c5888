"""Several meshes in one process, each made on a thread; and a check that they leave nothing behind."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import programs
import pytest
from soak.proxy import Proxy
from together import together

from fastcoll import config
from fastcoll.net.tcp.mesh import Mesh
from fastcoll.store import HashStore
from fastcoll.system.processes import Member

until = partial(programs.until, seconds=60.0)


def crew(n: int) -> list[Member]:
    """Return n ranks, all of them this process."""
    return [Member.here(rank, n, "tcp") for rank in range(n)]


def make_all(
    n: int, store: Any = None, members: Sequence[Member] | None = None, timeout: float = 60.0
) -> list[Any]:
    """Make every rank's mesh; return the meshes, or the errors."""
    shared = HashStore() if store is None else store
    known = crew(n) if members is None else members
    return together(*(lambda r=r: Mesh.make(shared, "WORLD", known, r, timeout) for r in range(n)))


@contextlib.contextmanager
def meshes(n: int, store: Any = None, timeout: float = 60.0) -> Iterator[list[Mesh]]:
    """Connect n meshes, and close them in order at the end."""
    made = make_all(n, store, timeout=timeout)
    errors = [each for each in made if isinstance(each, BaseException)]
    try:
        if errors:
            raise errors[0]
        yield made
    finally:
        for mesh in made:
            if isinstance(mesh, Mesh):
                mesh.monitor.leave()
                mesh.close()


class ProxiedStore(HashStore):
    """A store that publishes a proxy's address for each rank."""

    def __init__(self, **behaviour: Any) -> None:
        super().__init__()
        self.proxies: dict[int, Proxy] = {}
        self._behaviour = behaviour

    def set(self, key: str, value: str | bytes) -> None:
        folder, _, rank = key.rpartition("/")
        if folder == "group/member":
            addresses = json.loads(value)
            proxy = Proxy((addresses["addresses"][0], addresses["ports"][0]), **self._behaviour)
            self.proxies[int(rank)] = proxy
            value = json.dumps(addresses | {"ports": [proxy.port]})
        super().set(key, value)

    def await_held(self) -> None:
        """Wait until a proxy has forwarded all that it may."""
        until(lambda: any(proxy.held.is_set() for proxy in self.proxies.values()))

    def close(self) -> None:
        super().close()
        for proxy in self.proxies.values():
            proxy.close()


class Clock:
    """A clock of waits that the test sets: `monkeypatch.setattr(monitor, "time", Clock())`."""

    ahead = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead


@contextlib.contextmanager
def alarm(handler: Callable[..., None], waits: Callable[[], bool]) -> Iterator[None]:
    """Send the main thread a signal, for the handler, as soon as it waits in a call."""

    def send() -> None:
        until(waits)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)

    before, thread = signal.signal(signal.SIGALRM, handler), threading.Thread(target=send)
    thread.start()
    yield
    thread.join()
    signal.signal(signal.SIGALRM, before)


def died_of(mesh: Mesh) -> Any:
    """Poll the mesh's monitor as a waiting call does; return its decision."""
    return until(lambda: mesh.monitor.decide([], "testing"))


def elsewhere(member: Member) -> Member:
    """Return the same rank on a machine that this one cannot observe."""
    return replace(member, boot_id="another", host="far")


@contextlib.contextmanager
def default_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run without settings of the environment."""
    for name in list(os.environ):
        if name.startswith(("FASTCOLL_", "GLOO_")):
            monkeypatch.delenv(name)
    config.forget()
    yield
    config.forget()


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """Fail if a thread or a descriptor is left, after those that are ending have had time."""
    gc.collect()  # else garbage of earlier tests, freed meanwhile, could hide a leak of this one
    threads, descriptors = set(threading.enumerate()), open_descriptors()
    yield

    def left() -> list[object]:
        new = [pair for pair in open_descriptors().items() if pair not in descriptors.items()]
        return [thread for thread in threading.enumerate() if thread not in threads] + new

    end = time.monotonic() + 60
    while (found := left()) and time.monotonic() < end:
        time.sleep(0.01)
    assert not found, f"left behind: {found}"


def open_descriptors() -> dict[int, str]:
    found = {}
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the descriptor that listed the folder
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
    return {fd: name for fd, name in found.items() if "pidfd" not in name}
