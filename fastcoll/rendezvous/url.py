"""The init_method as data: its parts, and the rank and world size from it and from the arguments."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from ..errors import UsageError
from .join import check_rank

SCHEMES = ("env", "tcp", "file")


@dataclass(frozen=True)
class InitMethod:
    """A parsed init_method; rank and world_size are None where neither URL nor argument has them.

    Attributes:
        host, port: of tcp://; the host without brackets.
        path: of file://, absolute.
    """

    url: str
    scheme: str
    rank: int | None
    world_size: int | None
    host: str = ""
    port: int = 0
    path: str = ""

    @property
    def is_multicast(self) -> bool:
        """Whether the host is a multicast address, at which ranks can be assigned."""
        try:
            return ipaddress.ip_address(self.host.partition("%")[0]).is_multicast
        except ValueError:
            return False


def parse(url: str, rank: int, world_size: int) -> InitMethod:
    """The parts of `url`, with the arguments (-1: not given) merged in.

    Raises:
        UsageError: an unknown scheme or query, a missing host, port or path, or a rank or world size
            that is out of range or differs between URL and argument.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise UsageError(f"init_method {url!r} cannot be read: {error}") from error
    if parts.scheme not in SCHEMES or not url.startswith(f"{parts.scheme}://"):
        known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise UsageError(f"init_method {url!r} has no known scheme; there are {known}")
    query = _query(url, parts.query)
    chosen_rank = _merged(url, "rank", query.get("rank"), None if rank == -1 else rank)
    chosen_size = _merged(
        url, "world_size", query.get("world_size"), None if world_size == -1 else world_size
    )
    _check(chosen_rank, chosen_size)
    path = _path(url, parts) if parts.scheme == "file" else ""
    if parts.scheme == "tcp" and (not parts.hostname or port is None):
        raise UsageError(f"init_method {url!r} needs a host and a port, as in tcp://10.1.1.20:23456")
    return InitMethod(url, parts.scheme, chosen_rank, chosen_size, parts.hostname or "", port or 0, path)


def _query(url: str, text: str) -> dict[str, int]:
    values: dict[str, int] = {}
    for name, value in parse_qsl(text, keep_blank_values=True):
        if name not in ("rank", "world_size"):
            raise UsageError(
                f"init_method {url!r} has the unknown query {name!r}; rank and world_size are known"
            )
        if not value.isdecimal():
            raise UsageError(f"init_method {url!r}: {name} must be a whole number, got {value!r}")
        values[name] = int(value)
    return values


def _merged(url: str, name: str, in_url: int | None, given: int | None) -> int | None:
    if in_url is not None and given is not None and in_url != given:
        raise UsageError(
            f"{name}={given} was passed, but init_method {url!r} has {name}={in_url}; drop one of them"
        )
    return in_url if given is None else given


def _check(rank: int | None, world_size: int | None) -> None:
    """Refuse what is out of range, as far as it is known yet."""
    check_rank(rank or 0, world_size if world_size is not None else max(rank or 0, 0) + 1)


def _path(url: str, parts: SplitResult) -> str:
    path = unquote(parts.path)
    if parts.netloc not in ("", "localhost"):
        raise UsageError(f"init_method {url!r} names the host {parts.netloc!r}; a path begins with file:///")
    if not path.startswith("/") or path.endswith("/"):
        raise UsageError(
            f"init_method {url!r} needs the absolute path of a file, as in file:///mnt/nfs/shared"
        )
    return path
