"""From an init_method to a rank and a store: fastcoll's own ways to meet, and those that users register.

The ways to meet need sockets and more; each is imported when it is taken, so that importing fastcoll
is not charged for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ..core.arguments import positive_seconds, whole
from ..core.work import Timeout
from ..errors import UsageError
from .outcome import Rendezvous
from .store import DEFAULT_TIMEOUT, Store
from .torch_store import adopted

if TYPE_CHECKING:
    from .url import InitMethod

Handler = Callable[..., Iterator[tuple[Any, int, int]]]
_handlers: dict[str, Handler] = {}


def register_rendezvous_handler(scheme: str, handler: Handler) -> None:
    """Have `init_process_group` and `rendezvous` find the others by `handler` when a URL begins with `scheme`://.

    Args:
        handler: a generator function, called with the URL and `timeout` (a timedelta), which yields a store that
            all ranks share, of fastcoll or torch, and this process's rank and world size, once. The URL has those
            that were passed to `init_process_group` as ?rank=0&world_size=4. The generator is closed, and the store
            with it, when the process leaves the job; a handler that keeps a store yields a `PrefixStore` of it.

    Raises:
        UsageError: the scheme has a handler already, or is none; or the handler is no function.
    """
    from .url import SCHEMES

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
    """Whether a user's handler is for this URL."""
    return url.partition("://")[0] in _handlers


def rendezvous(
    url: str, rank: int = -1, world_size: int = -1, timeout: Timeout = None
) -> Iterator[tuple[Store, int, int]]:
    """Yield the store, this process's rank and the world size that `url` leads to, once, as torch's function does.

    Args:
        rank, world_size: -1 where the URL or the environment has them.
        timeout: seconds or timedelta; the default is 300 s.

    Raises:
        UsageError, RendezvousError, PeerDiedError, ResourceError: as `init_process_group`.

    Example:
        >>> store, rank, world_size = next(rendezvous("env://"))
        >>> store.set("key", "value")
    """
    limit = positive_seconds(timeout, DEFAULT_TIMEOUT.total_seconds())
    found = meet(url, whole("rank", rank), whole("world_size", world_size), limit)
    yield found.store, found.rank, found.world_size


def meet(init_method: str, rank: int, world_size: int, timeout: float, group_name: str = "") -> Rendezvous:
    """Find the other ranks as `init_method` says.

    Args:
        init_method: env://, tcp://host:port, tcp://<multicast address>:port or file:///path, each with
            an optional ?rank=0&world_size=4.
        rank, world_size: -1 where the URL or the environment has them, or ranks are to be assigned
            (multicast and file).
        timeout: seconds, for this and for the store's blocking operations afterwards.
        group_name: keeps jobs apart that use the same file or multicast address.

    Raises:
        UsageError: what was given is wrong, missing or contradictory.
        RendezvousError: the others did not come, or the store is gone.
        PeerDiedError: one of them came and died.
        ResourceError: a port, file or multicast group cannot be had.
    """
    if has_handler(init_method):
        return _ask(init_method, rank, world_size, timeout)
    from .url import parse

    method = parse(init_method, rank, world_size)
    match method.scheme:
        case "env":
            from .env_method import meet_by_environment

            found = meet_by_environment(method.rank, method.world_size, timeout)
        case "file":
            from .file_method import meet_in_file

            size = _needed_size(method)
            found = meet_in_file(method.path, method.rank, size, timeout, group_name)
        case _ if method.is_multicast:
            from .multicast_method import meet_by_multicast

            size = _needed_size(method)
            found = meet_by_multicast(method.host, method.port, method.rank, size, timeout, group_name)
        case _:
            from .tcp_method import meet_at_address

            source = f"init_method {method.url!r}"
            found = meet_at_address(method.host, method.port, method.rank, method.world_size, timeout, source)
    found.store.set_timeout(timeout)
    return found


def _ask(url: str, rank: int, world_size: int, timeout: float) -> Rendezvous:
    """What the user's handler for this URL finds."""
    from urllib.parse import urlencode

    from .join import check_rank

    given = urlencode({name: n for name, n in (("rank", rank), ("world_size", world_size)) if n != -1})
    separator = "" if not given else "&" if "?" in url else "?"
    answers = _handlers[url.partition("://")[0]](
        f"{url}{separator}{given}", timeout=timedelta(seconds=timeout)
    )
    answer = next(answers, None) if isinstance(answers, Iterator) else answers
    if not isinstance(answer, tuple) or len(answer) != 3 or not isinstance(answers, Iterator):
        raise UsageError(f"the handler of {url!r} must yield store, rank and world size, but gave {answer!r}")
    store, rank, world_size = adopted(answer[0]), whole("rank", answer[1]), whole("world_size", answer[2])
    check_rank(rank, world_size)
    return Rendezvous(store, rank, world_size, "", answers)


def _needed_size(method: InitMethod) -> int:
    if method.world_size is None:
        raise UsageError(
            f"init_method {method.url!r} needs the world size: pass world_size=..., or write ?world_size=4 behind "
            "the URL"
        )
    return method.world_size
