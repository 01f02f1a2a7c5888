"""The doctor's checks of the network: loopback, the interface that fastcoll would use, names and ports."""

from __future__ import annotations

import os
from collections.abc import Iterator

from .. import config
from ..errors import FastcollError, UsageError
from ..rendezvous.detect import port_beside
from ..system.address import is_loopback, listen, own_address, port_holder, resolve, tcp_sockets
from ..system.interfaces import choose, interfaces_here, wanted_here
from .finding import Finding

_LISTENS = "0A"
_LAUNCHERS_PORT = 29500


def loopback(ranks: int) -> Iterator[Finding]:
    """Check loopback, over which ranks of one machine meet, and which the backend `tcp` uses."""
    try:
        listen("127.0.0.1", 0).close()
    except FastcollError as error:
        yield Finding("problem", "loopback", str(error), "ip link set lo up")
        return
    if any(each.is_loopback for each in interfaces_here()):
        yield Finding("ok", "loopback", "127.0.0.1 can be listened on")
    else:
        yield Finding("problem", "loopback", "there is no loopback interface that is up", "ip link set lo up")


def interfaces(ranks: int) -> Iterator[Finding]:
    """Check which address connections between machines would use."""
    there = interfaces_here()
    listed = ", ".join(map(str, there)) or "none"
    try:
        wanted = wanted_here()
        used = choose(wanted, there, own_address(), None)
    except UsageError as error:
        yield Finding("problem", "interfaces", str(error), f"correct it; there are {listed}")
        return
    why = f"as {wanted.source} says" if wanted.names else "by the default route"
    if all(each.is_loopback for each in used):
        yield Finding("none", "interfaces", f"{listed}: no network, so jobs run on this machine alone")
    else:
        yield Finding(
            "ok", "interfaces", f"between machines: {', '.join(map(str, used))}, {why}; there are {listed}"
        )


def names(ranks: int) -> Iterator[Finding]:
    """Check whether other machines can use this machine's name as MASTER_ADDR."""
    host = os.uname().nodename
    try:
        addresses = sorted({str(address[0]) for _, address in resolve(host, 0)})
    except OSError as error:
        text = f"{host} has no address here ({error}); a job with this name as MASTER_ADDR does not start"
        yield Finding(
            "warning", "own name", text, "give an address as MASTER_ADDR, or put the name into /etc/hosts"
        )
        return
    if all(map(is_loopback, addresses)):
        text = (
            f"{host} is {', '.join(addresses)} here; with this MASTER_ADDR the store listens on all addresses"
        )
    else:
        text = f"{host} is {', '.join(addresses)}"
    yield Finding("ok", "own name", text)


def ports(ranks: int) -> Iterator[Finding]:
    """Check whether the ports where ranks and the store would listen are free."""
    used = {port for port, state, _ in tcp_sockets() if state == _LISTENS}
    chosen = config.get("FASTCOLL_PORT_RANGE")
    if chosen:
        free = [port for port in chosen if port not in used]
        text = f"FASTCOLL_PORT_RANGE={chosen[0]}-{chosen[-1]} has {len(free)} free ports"
        level = "ok" if len(free) >= ranks else "problem"
        cure = (
            ""
            if level == "ok"
            else f"{ranks} ranks need {ranks}: make the range larger, or end processes that listen there"
        )
        yield Finding("ok" if level == "ok" else "problem", "ports", text, cure)
    named = os.environ.get("MASTER_PORT", "")
    master = int(named) if named.isdecimal() and 0 < int(named) < 65536 else _LAUNCHERS_PORT
    store = port_beside(master)
    beside = f"MASTER_PORT={master}" if named else f"{master}, the launcher's for jobs on several machines"
    if store in used:
        holder = port_holder(store) or "a process that cannot be seen from here"
        text = f"{store}, where the store listens beside {beside}, is in use by {holder}"
        yield Finding(
            "warning",
            "ports",
            text,
            "if that is no rank of this job: give another MASTER_PORT, or end that process",
        )
    else:
        yield Finding("ok", "ports", f"{store}, where the store listens beside {beside}, is free")


CHECKS = (loopback, interfaces, names, ports)
