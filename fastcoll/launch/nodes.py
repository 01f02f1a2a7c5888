"""What is to be started on this node, the environment of each rank, the port of a job, and how its nodes end together.

| variable | meaning |
|---|---|
| RANK, WORLD_SIZE | among all ranks of the job |
| LOCAL_RANK, LOCAL_WORLD_SIZE | among those of this node |
| GROUP_RANK | the node's number |
| MASTER_ADDR, MASTER_PORT | where rank 0 listens |
| ROLE_*, GROUP_WORLD_SIZE, TORCHELASTIC_* | as torchrun sets them (command.py), for programs made for it |
| FASTCOLL_SECRET | the job's secret, which the launcher makes for a job of one node that was given none |
| OMP_NUM_THREADS, NUMBA_NUM_THREADS | 1 when several ranks share the node, unless set already |
| FASTCOLL_ELASTIC | HOST:PORT of a store that outlives the ranks, where some may fail and others go on |
| FASTCOLL_NEWCOMER | 1 for a process in the place of a rank that has failed; it has no RANK and no WORLD_SIZE |
| FASTCOLL_PLACE | with FASTCOLL_ELASTIC: the process's name, and the rank it has if the ranks have not met yet |

The launchers of a job's nodes tell one another that a rank has failed, so that all of them end. They meet in a store,
as ranks do, which node 0's launcher serves on a port of its own, with the job's secret. The first failure is set there.
A launcher that ends without a word, as by SIGKILL, is a failure as well: each leaves a last will with the store; and
where the store goes without saying that the job is over, it went with node 0's launcher. A launcher that cannot reach
the store goes on without: its ranks then end when their groups fail. The store is served until node 0's ranks have
ended, and after a failure until all nodes have read it, those included that are started a little later.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from .. import failpoints
from ..errors import FastcollError, ResourceError, StoreError, StoreTimeoutError
from ..rendezvous.attempts import Attempts, Loss, Place, Standing
from ..rendezvous.detect import port_beside
from .generations import Share
from .lifeline import describe_exit

if TYPE_CHECKING:
    from ..store import TCPStore

_LOWEST = 10000
_ATTEMPTS = 200
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FAILED, _CAME = "failed", "came"
_OVER = "null"  # in the place of a failure: node 0's ranks have ended well
_GONE = "ended without a word, or is out of reach"
_CONNECT_SECONDS = 600.0  # for node 0's launcher to be started
_TRY_SECONDS = 2.0  # of them at a time: so long goes a thread on that is to end
_FIRST_SECONDS = 2.0  # that ranks wait for their launcher to meet the others
_LOOK_SECONDS = 5.0  # a wait for the key; the server answers at its end
_LAST_SECONDS = 5.0  # for a failure to reach the others, as this launcher ends
_POLL_SECONDS = 0.05
_OF_LAUNCHERS = (
    "FASTCOLL_ELASTIC",
    "FASTCOLL_NEWCOMER",
    "FASTCOLL_PLACE",
)  # the launcher's own value would be wrong for its ranks
_THREADS = ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS")


def python_main(module: str) -> tuple[str, ...]:
    """The command of a new interpreter with this one's sys.path: `main` of a module, with whole numbers to follow."""
    boot = (
        "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
        f"from {module} import main; sys.exit(main(*map(int, sys.argv[2:])))"
    )
    return sys.executable, "-u", "-c", boot, json.dumps(sys.path)


@dataclass(frozen=True)
class Job:
    """One node's share of a job."""

    program: tuple[str, ...]  # what every rank runs
    local_size: int  # the ranks on this node
    nodes: int  # how many there are, each with as many ranks
    node_rank: int  # which one this is
    master_addr: str  # where rank 0 listens
    master_port: int
    arguments: tuple[str, ...] = ()  # the program's own
    pass_local_rank: bool = False  # whether `--local_rank=N` comes before them
    descriptors: tuple[int, ...] = ()  # of files that the ranks inherit
    elastic: str = ""  # where the store is that outlives the ranks
    given: Share | None = None  # the numbers of its ranks; None: all nodes have as many
    told: Mapping[str, str] = field(default_factory=dict)  # further variables, torchrun's among them
    _secret: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)

    @property
    def share(self) -> Share:
        """The numbers of this node's ranks."""
        first, size = self.node_rank * self.local_size, self.nodes * self.local_size
        return self.given or Share(self.node_rank, first, size, first, size)

    def rank(self, local_rank: int) -> int:
        """The rank in the whole job of one of this node's ranks."""
        return self.share.first + local_rank

    def place(self, local_rank: int, newcomer: int) -> Place:
        """Return the name in an elastic job of one of this node's ranks, or of its replacement, and the rank."""
        name = f"{self.node_rank}.new{newcomer}" if newcomer else f"{self.node_rank}.{local_rank}"
        return Place(name, self.rank(local_rank), self.share.world_size)

    def command(self, local_rank: int) -> list[str]:
        """The command line of one of this node's ranks."""
        told = [f"--local_rank={local_rank}"] if self.pass_local_rank else []
        return [*self.program, *told, *self.arguments]

    def single_threaded(self, inherited: Mapping[str, str]) -> list[str]:
        """The variables that are set to 1, so that the ranks of this node do not crowd its cores."""
        return [name for name in _THREADS if self.local_size > 1 and name not in inherited]

    def secret(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """The variable with the secret that is made for the job, if one is. Launchers of several nodes could not agree
        on one, so they and their ranks take the user's own where none is given.
        """
        has_one = inherited.get("FASTCOLL_SECRET") or inherited.get("FASTCOLL_SECRET_FILE")
        return {} if has_one or self.nodes > 1 else {"FASTCOLL_SECRET": self._secret}

    def environment(self, local_rank: int, inherited: Mapping[str, str], newcomer: int = 0) -> dict[str, str]:
        """Return the whole environment of one rank, or of its replacement number `newcomer`."""
        elastic = {"FASTCOLL_ELASTIC": self.elastic, "FASTCOLL_PLACE": str(self.place(local_rank, newcomer))}
        made = {
            **{name: value for name, value in inherited.items() if name not in _OF_LAUNCHERS},
            **self.secret(inherited),
            **{name: "1" for name in self.single_threaded(inherited)},
            **(elastic if self.elastic else {}),
            "RANK": str(self.rank(local_rank)),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(self.share.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "GROUP_RANK": str(self.node_rank),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
            **self.told,
        }
        if self.told:
            made["ROLE_RANK"] = str(self.share.role_first + local_rank)
            made["ROLE_WORLD_SIZE"] = str(self.share.role_size)
            made["GROUP_WORLD_SIZE"] = str(self.nodes)
        if newcomer:
            made["FASTCOLL_NEWCOMER"] = "1"
            for name in ("RANK", "WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE"):
                made.pop(name, None)
        return made


def free_port() -> int:
    """A random port that no socket of this machine uses now, nor the port beside it, for fastcoll's store."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """As free_port, so many, or ResourceError.

    They are below the kernel's range for outgoing connections: none of those can take one before rank 0 listens.
    Two jobs may still draw the same one: rank 0 then says who holds it.
    """
    from ..system.address import tcp_sockets  # with sockets

    used = {port for port, _, _ in tcp_sockets()}
    highest = _first_outgoing_port()
    pick = random.SystemRandom()  # a seeded `random` would give every job the same port
    ports: list[int] = []
    for _ in range(_ATTEMPTS * count):
        port = pick.randrange(_LOWEST, highest)
        if not used & {port, port_beside(port)}:
            ports.append(port)
            if len(ports) == count:
                return ports
    raise ResourceError(
        f"no free TCP port in {_LOWEST}..{highest - 1} after {_ATTEMPTS} attempts ({len(used)} are in use); "
        "close some, or choose one with --master_port"
    )


def _first_outgoing_port() -> int:
    try:
        first = int(_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first = 32768  # Linux's default
    return first if first >= _LOWEST + 1000 else 65536


@dataclass(frozen=True)
class Failure:
    """A rank's failure or a launcher's, on any node: the launchers' exit code, and what to say of it.

    0 stands for a reason to end ranks that is no failure. `leaves`: the launcher itself ends.
    """

    code: int
    text: str
    leaves: bool = False


def left(number: int) -> Failure:
    """What the others are to know of this launcher, which a signal ends."""
    how = describe_exit(-number)
    return Failure(128 + number, f"the launcher on host {os.uname().nodename} was ended: {how}", leaves=True)


def _text(failure: Failure) -> str:
    return json.dumps(asdict(failure))


class Nodes:
    """This node's part, of so many; a thread connects and waits for news. A context manager: leaves the others."""

    def __init__(self, count: int, node_rank: int, address: str, port: int) -> None:
        self._count, self._rank, self._address, self._port = count, node_rank, address, port
        self._lock = threading.Lock()
        self._store: TCPStore | None = None
        self._told: Failure | None = None
        self._known: Failure | None = None
        self._closed = False
        self._has_met = threading.Event()  # or cannot
        self._thread = threading.Thread(target=self._follow, name="fastcoll-nodes", daemon=True)

    def __enter__(self) -> Nodes:
        # Node 0 listens before its ranks start, so that nothing of the job takes the port.
        if self._rank == 0:
            self._open()
        self._thread.start()
        self._has_met.wait(_FIRST_SECONDS)  # a death before that is seen by nobody
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        end = time.monotonic() + _LAST_SECONDS
        if kind is not None:
            self.tell(self._end(f"was ended by {kind.__name__}"))
        if self._told is not None:
            self._thread.join(_LAST_SECONDS)  # it ends when it has read what was told, or cannot
        with self._lock:
            self._closed, store, self._store = True, self._store, None
        if store is not None and self._rank == 0:
            # Until all know of a failure, also those that are being started.
            while self._known is not None and store.add(_CAME, 0) < self._count and time.monotonic() < end:
                time.sleep(_POLL_SECONDS)
            store.compare_set(_FAILED, "", _OVER)
        if store is not None:
            store.close(max(0.0, end - time.monotonic()))  # node 0's is left by all others first
        self._thread.join(_LAST_SECONDS)  # a name that is looked up may take longer

    @property
    def address(self) -> str:
        """HOST:PORT of the store; empty where node 0's launcher could not make it."""
        from ..system.address import shown

        if self._rank != 0:
            return shown(self._address, self._port)
        return "" if self._store is None else shown(self._address, self._store.port)

    def failure(self) -> Failure | None:
        """The first failure of any node that has told of one. Never blocks."""
        return self._known

    def tell(self, failure: Failure) -> None:
        """Let the others know of a failure here, unless one was told before. Never blocks."""
        with self._lock:
            self._told, store = self._told or failure, self._store
        if store is not None:  # on a thread, as node 0 may be out of reach by now
            threading.Thread(target=self._publish, args=(store, failure), daemon=True).start()

    def report(self, loss: Loss) -> Future[Standing | None]:
        """Publish a loss on this node to all processes of an elastic job. Never blocks.

        The result is the job's state at that time; None if the store cannot be reached.
        """
        answer = Future[Standing | None]()

        def ask() -> None:
            standing, store = None, self._store
            try:
                with contextlib.suppress(StoreError):
                    standing = None if store is None else Attempts(store).report(loss)
            finally:
                answer.set_result(standing)

        threading.Thread(target=ask, name="fastcoll-loss", daemon=True).start()
        return answer

    def _open(self) -> None:
        """Reach the store, once node 0 serves it, unless this launcher ends before."""
        from ..store import TCPStore  # sockets and all that, for jobs of one node in vain

        end, store = time.monotonic() + _CONNECT_SECONDS, None
        while store is None and not self._closed:
            try:
                store = TCPStore(self._address, self._port, is_master=self._rank == 0, timeout=_TRY_SECONDS)
            except FastcollError as error:
                is_late = isinstance(error, StoreTimeoutError)
                if is_late and time.monotonic() <= end:
                    continue
                sys.stderr.write(
                    "fastcoll.launch: the nodes' launchers cannot meet, so a failure elsewhere does not end the ranks "
                    f"here at once: {f'{_CONNECT_SECONDS:g} s were in vain: ' if is_late else ''}{error}\n"
                )
                return
        with self._lock:
            closed, told = self._closed, self._told
            self._store = None if closed else store
        if store is not None and closed:
            store.close()
        elif store is not None and told is not None:
            self._publish(store, told)

    def _publish(self, store: TCPStore, failure: Failure) -> None:
        with contextlib.suppress(StoreError):  # node 0 has ended, and cannot tell the others any more
            store.compare_set(_FAILED, "", _text(failure))

    def _follow(self) -> None:
        """Wait for the first failure; ends with it, or when node 0's launcher or this one ends."""
        if self._rank != 0:
            self._open()
        with contextlib.ExitStack() as leaving:
            leaving.callback(self._has_met.set)
            if (store := self._store) is None:
                return
            try:
                if self._rank != 0:
                    leaving.callback(store.close)  # node 0's waits for that
                    failpoints.reach("launch.before_will")
                    leaving.callback(store.bequeath(_FAILED, _text(self._end(_GONE))))
                self._has_met.set()
                store.add(_CAME, 1)
                self._known = self._await_news(store)
            except ConnectionError:  # the store is gone, and did not say that the job is over
                self._known = Failure(1, f"the launcher of node 0 ({self._address}) {_GONE}")
            except (StoreError, ValueError, TypeError):
                pass  # it was closed, or holds something else

    def _await_news(self, store: TCPStore) -> Failure | None:
        """The first failure, or None when the job is over without one."""
        while not self._closed:
            with contextlib.suppress(StoreTimeoutError):
                told = json.loads(store.fetch([_FAILED], _LOOK_SECONDS)[0])
                return told and Failure(**told)
        return None

    def _end(self, how: str) -> Failure:
        """What the others are to know if this launcher ends before its ranks have."""
        where = f"node {self._rank} (pid {os.getpid()} on {os.uname().nodename})"
        return Failure(1, f"the launcher of {where} {how}")


def default_port(master_port: int) -> int:
    """Where launchers meet by default."""
    return port_beside(master_port, away=10000)
