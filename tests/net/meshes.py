"""Several meshes in one process, each made on a thread, and what must be left of them: nothing."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from together import together

from fastcoll.net.tcp.mesh import Mesh
from fastcoll.store import HashStore
from fastcoll.system.processes import Member
from net.proxy import Proxy


def crew(n: int) -> list[Member]:
    """n ranks, all of them this process."""
    return [Member.here(rank, n, "tcp") for rank in range(n)]


def make_all(
    n: int, store: Any = None, members: Sequence[Member] | None = None, timeout: float = 20.0
) -> list[Any]:
    """Every rank's mesh, or what it raised."""
    shared = HashStore() if store is None else store
    known = crew(n) if members is None else members
    return together(*(lambda r=r: Mesh.make(shared, "WORLD", known, r, timeout) for r in range(n)))


@contextlib.contextmanager
def meshes(n: int, store: Any = None, timeout: float = 20.0) -> Iterator[list[Mesh]]:
    """n meshes that are connected; closed in order at the end."""
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
    """A store that tells everybody to reach each rank through a proxy of its own."""

    def __init__(self, **behaviour: Any) -> None:
        super().__init__()
        self.proxies: dict[int, Proxy] = {}
        self._behaviour = behaviour

    def set(self, key: str, value: str | bytes) -> None:
        folder, _, rank = key.rpartition("/")
        if folder == "group/member":
            place = json.loads(value)
            proxy = Proxy((place["addresses"][0], place["ports"][0]), **self._behaviour)
            self.proxies[int(rank)] = proxy
            value = json.dumps(place | {"ports": [proxy.port]})
        super().set(key, value)

    def await_held(self) -> None:
        """Wait until a proxy has forwarded all that it may."""
        until(lambda: any(proxy.held.is_set() for proxy in self.proxies.values()))

    def close(self) -> None:
        super().close()
        for proxy in self.proxies.values():
            proxy.close()


class Clock:
    """The clock of waits, which a test puts forward: `monkeypatch.setattr(monitor, "time", Clock())`."""

    ahead = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead


def until(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    """What the condition comes to; the limit only ends a hang."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.001)
    return found


def died_of(mesh: Mesh) -> Any:
    """What the mesh's monitor comes to think, looking as a waiting call does."""
    return until(lambda: mesh.monitor.decide([], "testing"))


def elsewhere(member: Member) -> Member:
    """The same rank on a machine that cannot be seen from here."""
    return replace(member, boot_id="another", host="far")


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """Fails when a thread or a descriptor is left, once what is ending has had its time."""
    gc.collect()  # else what earlier tests have left could make room for what this one leaves
    threads, descriptors = set(threading.enumerate()), open_descriptors()
    yield

    def left() -> list[object]:
        new = [pair for pair in open_descriptors().items() if pair not in descriptors.items()]
        return [thread for thread in threading.enumerate() if thread not in threads] + new

    end = time.monotonic() + 10
    while (found := left()) and time.monotonic() < end:
        time.sleep(0.01)
    assert not found, f"left behind: {found}"


def open_descriptors() -> dict[int, str]:
    found = {}
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the one that listed the folder
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
    return {fd: name for fd, name in found.items() if "pidfd" not in name}
