"""The choice of the network interfaces and addresses for a group's connections.

FASTCOLL_SOCKET_IFNAME, else GLOO_SOCKET_IFNAME, names the interfaces: "eth0" is one interface, "eth0,eth1" distributes
the connections over both, "^docker0,lo" is any interface but these. If neither variable is set, connections use the
local address of the route to the store, which is also the route to the master (`outward`); if all ranks share one
network namespace, they use loopback.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from .. import config
from ..errors import UsageError
from .address import own_address, probe
from .processes import Member

IPV4, IPV6 = 4, 6
_SIOCGIFFLAGS, _SIOCGIFADDR, _UP = 0x8913, 0x8915, 1
_GLOBAL_SCOPE, _HOST_SCOPE = 0x00, 0x10


@dataclass(frozen=True)
class Interface:
    """One address of a network interface; `name` is empty if the interface is not known."""

    name: str
    address: str

    @property
    def family(self) -> int:
        return IPV6 if ":" in self.address else IPV4

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(self.address).is_loopback

    def __str__(self) -> str:
        return f"{self.address} ({self.name})" if self.name else self.address


@dataclass(frozen=True)
class Wanted:
    """The interfaces that the environment variable `source` selects.

    If `excluding` is False, these are the interfaces `names`, in this order; otherwise, all interfaces except `names`.
    """

    names: tuple[str, ...] = ()
    excluding: bool = False
    source: str = "FASTCOLL_SOCKET_IFNAME"


def wanted_here() -> Wanted:
    """Return the selection in this process's environment variables."""
    if text := config.get("FASTCOLL_SOCKET_IFNAME"):
        return parse(text)
    return parse(os.environ.get("GLOO_SOCKET_IFNAME", ""), "GLOO_SOCKET_IFNAME")


def parse(text: str, source: str = "FASTCOLL_SOCKET_IFNAME") -> Wanted:
    """Parse names separated by commas, or `^` and the names to exclude.

    Raises:
        UsageError: the text is malformed.
    """
    excluding = text.startswith("^")
    names = tuple(name.strip() for name in text.removeprefix("^").split(",")) if text else ()
    if not all(names) or len(set(names)) < len(names) or any("^" in name for name in names):
        raise UsageError(
            f"{source}={text!r} cannot be understood; give names as in 'eth0' or 'eth0,eth1', each once, or "
            "'^lo,docker0' for any but these"
        )
    return Wanted(names, excluding, source)


def choose(wanted: Wanted, there: Sequence[Interface], by_route: str, family: int | None) -> list[Interface]:
    """Choose the addresses to use, in order, from the interfaces in `there`.

    Args:
        by_route: the address that is used if the environment variable names no interface.
        family: 4 or 6, if the group has chosen one; None: first the family of `by_route` is tried, then IPv4, then
            IPv6.

    Raises:
        UsageError: a named interface does not exist, or none has an address of the family.
    """
    listed = ", ".join(f"{each.name} {each.address}" for each in there) or "none"
    unknown = set(wanted.names) - {each.name for each in there}
    if unknown and not wanted.excluding:
        names = ", ".join(name for name in wanted.names if name in unknown)
        raise UsageError(
            f"{wanted.source} names {names}, but {os.uname().nodename} has no such interface with an "
            f"address; there are {listed}"
        )
    route = next((each for each in there if each.address == by_route), Interface("", by_route))
    families = [family] if family else list(dict.fromkeys((route.family, IPV4, IPV6)))
    for version in families:
        of_family = [each for each in there if each.family == version]
        if wanted.names and not wanted.excluding:
            firsts = {each.name: each for each in reversed(of_family)}
            if firsts.keys() >= set(wanted.names):
                return [firsts[name] for name in wanted.names]
            continue
        if route.family == version and route.name not in wanted.names:
            return [route]
        loopback_too = route.is_loopback and not wanted.excluding
        for each in of_family:
            if each.name not in wanted.names and each.is_loopback == loopback_too:
                return [each]
    versions = " or ".join(f"IPv{version}" for version in families)
    raise UsageError(
        f"no {versions} address to use on {os.uname().nodename}; interfaces there: {listed}; choose with "
        "FASTCOLL_SOCKET_IFNAME, on every rank"
    )


def choose_here(towards_store: str, members: Sequence[Member], family: int | None) -> list[Interface]:
    """Choose the addresses for this process in a group.

    Args:
        towards_store: the local address of this process's connection to the group's store; empty: it has none.
    """
    there = interfaces_here()
    if all(member.same_network(members[0]) for member in members):
        own = [each for each in there if each.is_loopback]
        preferred = [each for each in own if family in (None, each.family)]
        by_route = next((each.address for each in preferred or own), "127.0.0.1")
    else:
        by_route = outward(there, towards_store)
    wanted = wanted_here()
    chosen = choose(wanted, there, by_route, family)
    far = next((member for member in members if not member.same_network(members[0])), None)
    closed = next((each for each in chosen if each.is_loopback and each.name in wanted.names), None)
    if far is not None and closed is not None:
        node = os.uname().nodename
        others = ", ".join(f"{each.name} {each.address}" for each in there if not each.is_loopback) or "none"
        raise UsageError(
            f"{wanted.source} names {closed.name}, but only {node} itself can connect to {closed.address}, and "
            f"{far} is on another host than {members[0]}; name an interface that both reach, or leave the variable "
            f"out; {node} has {others}"
        )
    return chosen


def address_for_others() -> str:
    """Choose the address by which other machines reach this rank; for callers to which the user has given no address.

    Raises:
        UsageError: FASTCOLL_SOCKET_IFNAME matches no interface of this machine.
    """
    there = interfaces_here()
    return choose(wanted_here(), there, outward(there), None)[0].address


def outward(there: Sequence[Interface], towards_store: str = "") -> str:
    """Return the address by which other machines reach this process.

    It is the local address of the route to the store's server. On the server's own machine it is the local address of
    the default route. If there is no default route, as on many compute nodes, it is the address of the first interface.
    """
    by_route = next((each.address for each in there if not each.is_loopback), "127.0.0.1")
    for text in (own_address(), towards_store):
        address = ipaddress.ip_address(text or "127.0.0.1")
        if not address.is_loopback and not address.is_link_local:
            by_route = text
    return by_route


def interfaces_here() -> list[Interface]:
    """Return the addresses of this network namespace, IPv4 first, in the order of the interfaces.

    Link-local addresses, and interfaces that are down, are left out.
    """
    names, found = [], []
    for _, name in socket.if_nameindex():
        with contextlib.suppress(OSError):  # the interface was just removed, or has no IPv4 address
            if struct.unpack_from("H", _ask(_SIOCGIFFLAGS, name), 16)[0] & _UP:
                names.append(name)
                found.append(Interface(name, socket.inet_ntoa(_ask(_SIOCGIFADDR, name)[20:24])))
    with contextlib.suppress(FileNotFoundError):  # a kernel without IPv6
        with open("/proc/net/if_inet6", encoding="ascii") as file:
            table = parse_inet6(file.read())
        found += [each for name in names for each in table if each.name == name]
    return found


def parse_inet6(table: str) -> list[Interface]:
    """Return the addresses in /proc/net/if_inet6, without the link-local ones, which need an interface's name."""
    found = []
    for line in table.splitlines():
        number, _, _, scope, _, name = line.split()
        if int(scope, 16) in (_GLOBAL_SCOPE, _HOST_SCOPE):
            found.append(Interface(name, str(ipaddress.IPv6Address(int(number, 16)))))
    return found


def _ask(request: int, name: str) -> bytes:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        return fcntl.ioctl(any_socket, request, struct.pack("256s", name.encode()[:15]))


# The connection with a silent host is broken 8 s after the last packet from the host.
_PROBE_AFTER_SECONDS, _SILENT_MILLISECONDS = 2, 8000


def tune(connection: socket.socket) -> None:
    """Make a connection nonblocking, make it send small messages at once, and make the kernel probe a silent peer."""
    connection.setblocking(False)
    probe(connection, _PROBE_AFTER_SECONDS)


def watch(connection: socket.socket) -> None:
    """Make the kernel break a control connection 8 s after the last packet from the peer's host.

    The probes of `tune` do this only while no data is unacknowledged; with TCP_USER_TIMEOUT the limit holds always. Do
    not use this for other connections: TCP_USER_TIMEOUT also ends a connection whose reader leaves its buffer full for
    that long, although the reader is alive and only busy (on Linux 6.18 with a limit of 3 s: ETIMEDOUT after 3.5 s).
    The two notices of a control connection never fill a buffer.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENT_MILLISECONDS)


def family_of(address: str) -> socket.AddressFamily:
    """Return IPv6 for an address with colons, else IPv4."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET
