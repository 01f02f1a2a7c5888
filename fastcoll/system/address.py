"""Host names, addresses, listening sockets, free ports, and the limit of file descriptors."""

from __future__ import annotations

import errno
import functools
import hashlib
import ipaddress
import logging
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress

from ..errors import ResourceError, UsageError
from .processes import network_here

logger = logging.getLogger("fastcoll")

# Room for the connections that all ranks open at once. The kernel limits it to net.core.somaxconn (4,096 since Linux
# 5.4); a client that meets a full queue retries after 1, 3, 7 ... s.
_BACKLOG = 1 << 16
_TCP_LISTEN = "0A"  # TCP_LISTEN of the kernel's tcp_states.h
NAME_SIZE, PLACE_SIZE = 16, 20  # bytes of the digests that `name_of` and `place_of` return
# Errors for an address whose family or network this machine lacks; another address of the same name may work.
UNREACHABLE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.ENETUNREACH)
SockAddr = tuple[str, int] | tuple[str, int, int, int]
# Targets for "connecting" a datagram socket, which shows the local address that faces the network. Nothing is sent, and
# these blocks are reserved for documentation (RFC 5737, RFC 3849).
_ELSEWHERE = ("192.0.2.1", "2001:db8::1")


def resolve(host: str, port: int) -> list[tuple[socket.AddressFamily, SockAddr]]:
    """Return the TCP addresses of `host`, IPv4 first.

    OSError: there is none. UsageError: `host` cannot be a name.

    IPv4 comes first, so that the server and the clients of `localhost` choose the same address.
    """
    # For bytes Python does not import the tables of names in other scripts.
    name = host.encode() if host.isascii() else host
    try:
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise UsageError(f"{host!r} is no name of a host: {error}") from error
    pairs = {(family, address): None for family, _, _, _, address in found}
    return sorted(pairs, key=lambda pair: pair[0] != socket.AF_INET)  # type: ignore[arg-type]


def shown(host: str, port: int) -> str:
    """Return `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen(host: str, port: int) -> socket.socket:
    """Return a listening TCP socket on `host` only; port 0 takes a free one.

    Raises:
        UsageError: `host` is no address of this machine.
        ResourceError: the port is in use (the text names the process) or not allowed.
    """
    where = shown(host, port)
    try:
        choices = resolve(_bindable(host), port)
    except OSError as error:
        raise UsageError(f"the store's host {host!r} has no address here ({error})") from error
    refused: OSError | None = None
    for family, address in choices:
        with ExitStack() as undo:
            try:
                listener = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(address)
                listener.listen(_BACKLOG)
                listener.setblocking(False)
                undo.pop_all()
                return listener
            except OSError as error:
                if error.errno == errno.EADDRINUSE and port == 0:
                    raise no_port(f"the store cannot listen on {host}") from error
                if error.errno == errno.EADDRINUSE:
                    holder = port_holder(port) or "a process that cannot be seen from here"
                    raise ResourceError(
                        f"the store cannot listen on {where}: the port is in use by {holder}; end that process or "
                        "choose another port (MASTER_PORT, or the port of the init_method)"
                    ) from error
                if error.errno not in UNREACHABLE:
                    raise ResourceError(f"the store cannot listen on {where}: {error.strerror}") from error
                # The name may have several addresses, of which this machine has only a later one; clients try them all.
                refused = error
    raise UsageError(
        f"the store cannot listen on {where}: that is no address of this machine ({socket.gethostname()}), where "
        "rank 0 runs; give an address of the machine of rank 0"
    ) from refused


def no_port(what: str) -> ResourceError:
    """Return the error for the lack of a free ephemeral port."""
    ports = "the kernel gives out"
    with suppress(OSError), open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as file:
        ports = "from {} to {}".format(*file.read().split())
    return ResourceError(
        f"{what}: no port is free on {os.uname().nodename}, of those {ports} (net.ipv4.ip_local_port_range); end what "
        "uses them, or widen that range"
    )


# If no port is free for a connection, it is retried for this long, because other connections may end meanwhile.
PORTLESS_SECONDS = 2.0


def portless(error: OSError, where: str) -> ResourceError | None:
    """Return the error to raise if a connection failed because no port was free; else None."""
    if error.errno != errno.EADDRNOTAVAIL:
        return None
    # The errno is the same if this machine has no address of the target's family; but then a port can still be bound.
    with socket.socket() as other:
        try:
            other.bind(("", 0))
        except OSError:
            return no_port(f"cannot connect to {where}")
    return None


def probe(connection: socket.socket, after: int) -> None:
    """Make a connection send small messages at once, and make the kernel probe a silent peer.

    The kernel sends the first probe after `after` silent seconds, and breaks the connection if the peer's host answers
    none of six probes, 1 s apart. If only the peer's process is stopped, its kernel still answers. There are six
    because a network may lose some: with three probes, a network that lost 5 % of its packets broke 19 of 300 idle
    connections within 95 s; with six, none.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_NODELAY, 1), (socket.TCP_KEEPIDLE, after), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 6)
    ):  # fmt: skip
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def inherit_listener(descriptor: int) -> socket.socket:
    """Return the listening TCP socket with this file descriptor, and take ownership of it.

    Raises:
        UsageError: the descriptor is no listening TCP socket.
    """
    try:
        listener = socket.socket(fileno=descriptor)
    except (OSError, OverflowError, TypeError, ValueError) as error:
        raise UsageError(f"master_listen_fd is {descriptor!r}, which is no socket ({error})") from error
    is_tcp = listener.family in (socket.AF_INET, socket.AF_INET6)
    if not (is_tcp and listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)):
        listener.detach()
        raise UsageError(f"master_listen_fd is {descriptor!r}, but no TCP socket that listens")
    listener.setblocking(False)
    return listener


@functools.lru_cache(64)  # each connection's digests need the same few addresses, and parsing one takes 10 us
def ip_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Parse `host` as an IP address, ignoring an interface after %; return None for a name."""
    try:
        return ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Return whether only this machine can connect to `host`."""
    address = ip_of(host)
    return host == "localhost" if address is None else address.is_loopback


def place_of(address: str, port: int) -> bytes:
    """Return a digest of an address and port, for the opening of a store's client (store/opening.py).

    The digest is equal at both ends of the connection unless the address is translated on the way (NAT, a tunnel).
    """
    ip = ip_of(address)
    mapped = getattr(ip, "ipv4_mapped", None)  # from a dual-stack socket
    return _digest(str(mapped or ip), port, PLACE_SIZE)


def name_of(host: str, port: int) -> bytes:
    """Return a digest of a store's host name or address, as this process was given it, and its port."""
    return _digest(host.lower(), port, NAME_SIZE)


def _digest(host: str, port: int, size: int) -> bytes:
    """Hash host and port; for loopback addresses and 0.0.0.0 also the network namespace.

    Without the namespace all machines would have the same digest, because these addresses are equal on all machines.
    """
    ip = ip_of(host)
    is_own = is_loopback(host) or (ip is not None and ip.is_unspecified)
    return hashlib.blake2b(f"{host} {port} {is_own and network_here()}".encode(), digest_size=size).digest()


def _bindable(host: str) -> str:
    """Return `host`, or the address of all interfaces if `host` is a name that means loopback here.

    Debian writes 127.0.1.1 for the machine's name into /etc/hosts; other machines resolve this name to an address of
    the network and connect there.
    """
    if host == "localhost" or ip_of(host) or not all(is_loopback(str(at[0])) for _, at in resolve(host, 0)):
        return host
    logger.info("the name %s means loopback on this machine; the store listens on all addresses", host)
    return "0.0.0.0"


def own_address(towards: str | None = None) -> str:
    """Return the local address of the route to `towards` (None: to the network), or loopback if there is no route."""
    for target in (towards,) if towards is not None else _ELSEWHERE:
        family = socket.AF_INET6 if ":" in target else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((target, 9))
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return "::1" if towards is not None and ":" in towards else "127.0.0.1"


def tcp_sockets() -> Iterator[tuple[int, str, str]]:
    """Yield local port, state and inode of each TCP socket of this network namespace.

    This takes 10 ms on a machine with much memory, because the kernel scans its socket table, which grows with memory.
    """
    for name in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError), open(name, encoding="ascii") as file:  # no IPv6 in this kernel
            for row in map(str.split, file.readlines()[1:]):
                yield int(row[1].rpartition(":")[2], 16), row[3], row[9]


def port_holder(port: int) -> str | None:
    """Return `pid 123 (python train.py)` of a process that listens on `port`, or None.

    Only this network namespace is searched, and only processes whose descriptors are readable.
    """
    found = [inode for at, state, inode in tcp_sockets() if at == port and state == _TCP_LISTEN]
    sockets = {f"socket:[{inode}]" for inode in found}
    for pid in filter(str.isdigit, os.listdir("/proc") if sockets else ()):
        with suppress(OSError):  # the process has ended, or belongs to another user
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    if os.readlink(f"/proc/{pid}/fd/{fd}") in sockets:
                        command = "its command is not readable"
                        with suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
                            text = file.read().replace(b"\0", b" ").decode(errors="replace")
                            command = " ".join(text.split())[:120]
                        return f"pid {pid} ({command})"
    return None


# `make_room` keeps this many descriptors free for other uses: files, libraries, pidfds, the connections of groups.
FOR_OTHERS = 64
CURE = "raise it before the start (ulimit -n, systemd's LimitNOFILE=, docker's --ulimit nofile=)"


# By this number the limit is raised if the caller does not need a particular number of descriptors.
_MORE_DESCRIPTORS = 1024


def no_descriptor(error: BaseException, what: str) -> ResourceError | None:
    """Return the error for `what` if `error` means that no descriptor is free.

    Return None if `error` has another cause.
    """
    number = error.errno if isinstance(error, OSError) and not isinstance(error, ResourceError) else None
    if number not in (errno.EMFILE, errno.ENFILE):
        return None
    most = f"process {os.getpid()}, which may open {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}"
    whose = most if number == errno.EMFILE else "the machine"
    return ResourceError(f"{what}: no file descriptor is left to {whose}, on {os.uname().nodename}; {CURE}")


def make_room(connections: int, what: str) -> None:
    """Raise the limit, if needed, so that this process can open `connections` more descriptors for `what`.

    Raises:
        ResourceError: the hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(os.listdir("/proc/self/fd")) + connections + FOR_OTHERS
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise ResourceError(
            f"{what} needs {needed} file descriptors, and process {os.getpid()} on {os.uname().nodename} may have "
            f"{hard}; {CURE}"
        )
    raise_limit(what, needed - soft)


def raise_limit(what: str, by: int = _MORE_DESCRIPTORS) -> bool:
    """Raise the soft limit of file descriptors by `by`, as far as the hard limit allows.

    Returns:
        Whether the limit was raised.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft in (resource.RLIM_INFINITY, hard):
        return False
    new = soft + by if hard == resource.RLIM_INFINITY else min(soft + by, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (new, hard))
    logger.info("raised this process's limit of file descriptors from %d to %d for %s", soft, new, what)
    return True
