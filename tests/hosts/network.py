"""Hosts on one machine: namespaces of Linux, joined by veth pairs and one bridge for each of their links.

A host is a shell that waits in its own namespaces, and so is the switch with its bridges. No namespace has a name: it
ends with its last process, and the shells end when this process ends, for any reason. So nothing is left behind. The
addresses are only used in these networks, so they collide with no others.

| | in every host's own namespaces | shared with the machine |
|---|---|---|
| always | interfaces lo, eth0, ...; its name; /dev/shm; /etc/hosts, with all names | other files, boot id, cores |
| own_pids | process ids and /proc | else process ids |
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import TracebackType
from typing import Any

from fastcoll.launch import lifeline


@cache
def lacking() -> str | None:
    """Return why hosts cannot be made here, with the cure, or None."""
    if os.geteuid() != 0:
        return "hosts on one machine need root, for network namespaces"
    if shutil.which("ip") is None:
        return "hosts on one machine need iproute2: apt-get install iproute2"
    try_out = ["unshare", "--net", "--mount", "--uts", "ip", "link", "add", "name", "b", "type", "bridge"]
    done = subprocess.run(try_out, capture_output=True, text=True, check=False)
    return f"no namespaces with a bridge here: {done.stderr.strip()}" if done.returncode else None


class Closing(contextlib.AbstractContextManager[Any]):
    """A context manager that calls `close` at the end."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None: ...


class _Namespace:
    """A shell in its own namespaces, which ends with this process."""

    def __init__(self, kinds: Sequence[str], setup: str) -> None:
        self._forks = "--pid" in kinds
        script = f"set -e\n{setup}\necho ready\nread _ || :"
        fork = ["--fork", "--kill-child", "--mount-proc"] if self._forks else []
        # Orphans become children of the host's first process: bash reaps them, sh does not.
        self._shell = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "unshare", *kinds, *fork, "bash", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._shell.stdout is not None
        if self._shell.stdout.readline() != "ready\n":
            raise OSError(f"a host could not be made: {self._shell.communicate()[1]}")
        self._kinds = kinds

    @property
    def pid(self) -> int:
        """The shell's process id, as this process sees it."""
        return lifeline.children_of(self._shell.pid)[0] if self._forks else self._shell.pid

    def enter(self) -> list[str]:
        """Return the words that run a command inside the namespaces, in the current directory."""
        # In another mount namespace a process starts in the root directory.
        return ["nsenter", "--target", str(self.pid), *self._kinds, "env", "--chdir", os.getcwd()]

    def run(self, *words: str, input: str | None = None) -> str:
        """Run a short command inside and return what it prints.

        Raises:
            OSError: it failed; the message has its stderr.
        """
        done = subprocess.run([*self.enter(), *words], input=input, capture_output=True, text=True)
        if done.returncode:
            raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")
        return done.stdout

    def close(self) -> None:
        """End the shell, and its namespaces unless other processes are in them. Calling it twice is fine."""
        for pipe in (self._shell.stdin, self._shell.stdout, self._shell.stderr):
            if pipe is not None:
                pipe.close()
        self._shell.kill()
        self._shell.wait()


class Host:
    """One host of a Network.

    Attributes:
        index: from 0.
        name: what `hostname` says there.
        addresses: its IPv4 address on each link, whose interfaces are eth0, eth1, ...
        addresses6: the same for IPv6.
    """

    def __init__(self, index: int, hosts: int, links: int, own_pids: bool) -> None:
        self.index = index
        self.name = f"host{index}"
        self.addresses = [f"10.77.{link}.{index + 1}" for link in range(links)]
        self.addresses6 = [f"fd77:{link}::{index + 1}" for link in range(links)]
        kinds = ["--net", "--mount", "--uts", *(["--pid"] if own_pids else [])]
        shm = "mount -t tmpfs -o size=1g,mode=1777 fastcoll-host /dev/shm"
        basics = f"hostname {self.name}; mount -t sysfs sysfs /sys; ip link set lo up"
        self.namespace = _Namespace(kinds, f"{shm}; {basics}; {_know_names(hosts)}")

    @property
    def address(self) -> str:
        """The IPv4 address on the first link."""
        return self.addresses[0]

    @property
    def root(self) -> str:
        """A path to the host's file system, for example to its /dev/shm."""
        return f"/proc/{self.namespace.pid}/root"

    def enter(self) -> list[str]:
        """Return the words that run a command on this host."""
        return self.namespace.enter()

    def start(self, words: Sequence[str], env: Mapping[str, str] | None = None, **rest: Any) -> Started:
        """Start a program on this host, in its own session; it ends with this process."""
        tied = [sys.executable, "-I", "-S", lifeline.__file__, str(os.getpid())]
        command = [*tied, *self.enter(), *words]
        return Started(subprocess.Popen(command, env=env, start_new_session=True, **rest))


@dataclass
class Started:
    """A running program on a host."""

    process: subprocess.Popen[bytes]

    def end(self) -> None:
        """Kill its process group. Calling it twice is fine."""
        if self.process.poll() is None:
            lifeline.signal_group(self.process.pid, signal.SIGKILL)
            self.process.wait()


class Network(Closing):
    """Hosts that reach one another, and nothing else.

    Args:
        hosts: how many.
        links: number of interfaces of each host, each in its own subnet.
        own_pids: give each its own process ids, so that no process of one can see another's.
    """

    def __init__(self, hosts: int, links: int = 1, own_pids: bool = False) -> None:
        self._undo = contextlib.ExitStack()
        with self._undo:
            self._switch = self._keep(_Namespace(["--net"], ":"))
            self.hosts: list[Host] = []
            for index in range(hosts):
                host = Host(index, hosts, links, own_pids)
                self._keep(host.namespace)
                self.hosts.append(host)
            self._join()
            self._undo = self._undo.pop_all()

    def _keep(self, namespace: _Namespace) -> _Namespace:
        self._undo.callback(namespace.close)
        return namespace

    def __iter__(self) -> Iterator[Host]:
        return iter(self.hosts)

    def close(self) -> None:
        """End the hosts. Calling it twice is fine."""
        self._undo.close()

    def cut(self, host: Host, link: int = 0) -> None:
        """Make a host vanish: all packets from and to it are lost, without an error."""
        self._switch.run("ip", "link", "set", _port(host, link), "nomaster")

    def lose(self, source: Host, target: Host) -> None:
        """Lose all packets from one host to another on the first link, but not those in the other direction."""
        nobody = "02:00:00:00:00:99"
        words = f"neigh replace {target.address} lladdr {nobody} dev eth0 nud permanent"
        source.namespace.run("ip", *words.split())

    def _join(self) -> None:
        links = range(len(self.hosts[0].addresses))
        lines = [f"link add name br{link} up type bridge" for link in links]
        for host in self.hosts:
            for link in links:
                port, pid = _port(host, link), host.namespace.pid
                lines.append(f"link add name {port} type veth peer name eth{link} netns {pid}")
                lines.append(f"link set {port} master br{link} up")
        self._switch.run("ip", "-batch", "-", input="\n".join(lines))
        for host in self.hosts:
            host.namespace.run("ip", "-batch", "-", input="\n".join(_addresses(host)))


def _port(host: Host, link: int) -> str:
    """Return the switch's end of a host's link."""
    return f"port{host.index}-{link}"


def _know_names(hosts: int) -> str:
    """Return the command that gives a host its own /etc/hosts, as long as the host exists."""
    lines = ["127.0.0.1 localhost", *(f"10.77.0.{index + 1} host{index}" for index in range(hosts))]
    write = f"printf '%s\\n' {' '.join(map(repr, lines))} > /mnt/hosts"
    return (
        f"mount -t tmpfs fastcoll-names /mnt; {write}; mount --bind /mnt/hosts /etc/hosts; umount --lazy /mnt"
    )


def _addresses(host: Host) -> Iterator[str]:
    for link, (four, six) in enumerate(zip(host.addresses, host.addresses6, strict=True)):
        yield f"address add {four}/24 dev eth{link}"
        yield f"address add {six}/64 dev eth{link} nodad"
        yield f"link set eth{link} up"
