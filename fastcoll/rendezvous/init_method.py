"""Turns an init_method into a rank and a store: by fastcoll's own rendezvous methods, or handlers of users.

The methods and the URL parser are imported when they are needed, to keep `import fastcoll` fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ..core.operands import positive_seconds, whole
from ..core.work import Timeout
from ..errors import UsageError
from ..store.store import DEFAULT_TIMEOUT, Rendezvous, Store
from ..store.views import imported
from .detect import MOST_DIGITS
from .join import check_rank

SCHEMES = ("env", "tcp", "file")
Handler = Callable[..., Iterator[tuple[Any, int, int]]]
_handlers: dict[str, Handler] = {}


def register_rendezvous_handler(scheme: str, handler: Handler) -> None:
    """Register a handler that finds the other ranks for URLs that begin with `scheme`://.

    `init_process_group` and `rendezvous` call it.

    Args:
        scheme: a word, such as "mine" for mine://.
        handler: a generator function, called with the URL and `timeout` (a timedelta). It yields one tuple: a store
            that all ranks share (of fastcoll or torch), this process's rank, and the world size. If a rank and a world
            size were passed to `init_process_group`, they are in the URL, as ?rank=0&world_size=4. When the process
            leaves the job, the generator and the store are closed; to keep the store open, yield a `PrefixStore` of it.

    Raises:
        UsageError: the scheme is not a word or has a handler already, or the handler is not a function.
    """
    if not isinstance(scheme, str) or not scheme.isidentifier():
        raise UsageError(f"scheme is {scheme!r}; give a word, as mine for mine://")
    if scheme in SCHEMES or scheme in _handlers:
        raise UsageError(f"{scheme}:// has a rendezvous handler already; choose another word")
    if not callable(handler):
        raise UsageError(
            f"handler is {handler!r}; give a generator function that yields store, rank and world size"
        )
    _handlers[scheme] = handler


def has_handler(url: str) -> bool:
    """Return whether a user has registered a handler for this URL."""
    return url.partition("://")[0] in _handlers


def rendezvous(
    url: str, rank: int = -1, world_size: int = -1, timeout: Timeout = None
) -> Iterator[tuple[Store, int, int]]:
    """Yield, once, the store, this process's rank and the world size for `url`, like torch's function.

    Args:
        url: see `init_method` of `init_process_group`.
        rank, world_size: -1 if the URL or the environment has them.
        timeout: seconds or timedelta; the default is 300 s.

    Raises:
        UsageError, RendezvousError, PeerDiedError, ResourceError: as for `init_process_group`.

    Examples:
        >>> store, rank, world_size = next(rendezvous("env://"))
        >>> store.set("key", "value")
    """
    limit = positive_seconds(timeout, DEFAULT_TIMEOUT.total_seconds())
    found = meet(url, whole("rank", rank), whole("world_size", world_size), limit)
    yield found.store, found.rank, found.world_size


def meet(init_method: str, rank: int, world_size: int, timeout: float, group_name: str = "") -> Rendezvous:
    """Find the other ranks by an init method; arguments and errors are those of `init_process_group`.

    `rank` and `world_size` are -1 if the URL or the environment has them. A multicast address or a file assigns a rank
    to a process without one. `group_name` distinguishes jobs that use the same file or multicast address.
    """
    if has_handler(init_method):
        return _ask(init_method, rank, world_size, timeout)
    from . import methods  # imports sockets

    method = parse(init_method, rank, world_size)
    its_rank, size = method.rank, method.world_size
    if method.scheme == "env":
        found = methods.meet_by_environment(its_rank, size, timeout)
    elif method.scheme == "tcp" and not method.is_multicast:
        source = f"init_method {method.url!r}"
        found = methods.meet_at_address(method.host, method.port, its_rank, size, timeout, source)
    elif size is None:
        raise UsageError(
            f"init_method {method.url!r} needs the world size: pass world_size=..., or write ?world_size=4 behind "
            "the URL"
        )
    elif method.scheme == "file":
        found = methods.meet_in_file(method.path, its_rank, size, timeout, group_name)
    else:
        from .multicast import meet_by_multicast

        found = meet_by_multicast(method.host, method.port, its_rank, size, timeout, group_name)
    found.store.set_timeout(timeout)
    return found


def _ask(url: str, rank: int, world_size: int, timeout: float) -> Rendezvous:
    """Call the user's handler for this URL, and check its result."""
    from urllib.parse import urlencode

    given = urlencode({name: n for name, n in (("rank", rank), ("world_size", world_size)) if n != -1})
    separator = "" if not given else "&" if "?" in url else "?"
    answers = _handlers[url.partition("://")[0]](
        f"{url}{separator}{given}", timeout=timedelta(seconds=timeout)
    )
    answer = next(answers, None) if isinstance(answers, Iterator) else answers
    if not isinstance(answer, tuple) or len(answer) != 3 or not isinstance(answers, Iterator):
        raise UsageError(f"the handler of {url!r} must yield store, rank and world size, but gave {answer!r}")
    store, rank, world_size = imported(answer[0]), whole("rank", answer[1]), whole("world_size", answer[2])
    check_rank(rank, world_size)
    return Rendezvous(store, rank, world_size, "", answers)


@dataclass(frozen=True)
class InitMethod:
    """A parsed init_method; rank and world_size are None if neither the URL nor an argument has them."""

    url: str
    scheme: str
    rank: int | None
    world_size: int | None
    host: str = ""  # without brackets
    port: int = 0
    path: str = ""  # absolute

    @property
    def is_multicast(self) -> bool:
        """True if the host is a multicast address, at which ranks are assigned to processes without one."""
        from ..system.address import ip_of  # imports sockets

        address = ip_of(self.host)
        return address is not None and address.is_multicast


def parse(url: str, rank: int, world_size: int) -> InitMethod:
    """Parse `url`, and add the arguments (-1: not given). UsageError: the URL is malformed, or they contradict it."""
    from urllib.parse import parse_qsl, unquote, urlsplit

    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise UsageError(f"init_method {url!r} cannot be read: {error}") from error
    if parts.scheme not in SCHEMES or not url.startswith(f"{parts.scheme}://"):
        known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise UsageError(f"init_method {url!r} has no known scheme; there are {known}")
    numbers = {name: number for name, number in (("rank", rank), ("world_size", world_size)) if number != -1}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name not in ("rank", "world_size"):
            raise UsageError(
                f"init_method {url!r} has the unknown query {name!r}; rank and world_size are known"
            )
        if not value.isdecimal() or len(value) > MOST_DIGITS:
            raise UsageError(f"init_method {url!r:.200}: {name} must be a whole number, got {value!r:.80}")
        if (given := numbers.setdefault(name, int(value))) != int(value):
            raise UsageError(
                f"{name}={given} was passed, but init_method {url!r} has {name}={int(value)}; drop one of them"
            )
    chosen_rank, chosen_size = numbers.get("rank"), numbers.get("world_size")
    # The rank, the size, or both may still be unknown. An unknown number is replaced by one that passes the check.
    check_rank(chosen_rank or 0, max(chosen_rank or 0, 0) + 1 if chosen_size is None else chosen_size)
    path = ""
    if parts.scheme == "file":
        path = unquote(parts.path)
        if parts.netloc not in ("", "localhost"):
            raise UsageError(
                f"init_method {url!r} names the host {parts.netloc!r}; a path begins with file:///"
            )
        if not path.startswith("/") or path.endswith("/"):
            raise UsageError(
                f"init_method {url!r} needs the absolute path of a file, as in file:///mnt/nfs/shared"
            )
    if parts.scheme == "tcp" and (not parts.hostname or port is None):
        raise UsageError(f"init_method {url!r} needs a host and a port, as in tcp://10.1.1.20:23456")
    return InitMethod(url, parts.scheme, chosen_rank, chosen_size, parts.hostname or "", port or 0, path)
