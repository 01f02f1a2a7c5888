"""The table of FASTCOLL_* settings; each is read from the environment when it is first used."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from . import failpoints
from .errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

_log = logging.getLogger("fastcoll")

_PREFIX = "FASTCOLL_"
MOST_STREAMS = 64
NO_FILE = "none"  # the value of FASTCOLL_TUNING with which no file is read or written
# In the order of the numbers in shm/autotune.py.
SHM_ALGORITHMS = "close", "past", "ahead", "ahead_out", "past_out", "direct"
MOST_SECONDS = 1e9  # the longest timeout, 32 years; it must be less than threading.TIMEOUT_MAX, 292 years


class MetricsAddress(NamedTuple):
    """An address to listen at."""

    host: str
    port: int


@dataclass(frozen=True)
class Setting:
    """One environment variable: its parser, its default, and its meaning."""

    parse: Callable[[str], Any]
    default: Any
    meaning: str


def _checked(kind: Callable[[str], Any], must: str, fits: Callable[[Any], bool]) -> Callable[[str], Any]:
    """Return a parser that refuses values for which `fits` is False; `must` describes the allowed values."""

    def parse(text: str) -> Any:
        value = kind(text)
        if not fits(value):
            raise ValueError(f"must be {must}")
        return value

    return parse


def _from_to(least: int, most: int) -> Callable[[str], Any]:
    return _checked(int, f"from {least} to {most}", lambda value: least <= value <= most)


def _ports(text: str) -> range | str:
    if not text:
        return ""
    first, _, last = text.partition("-")
    ports = range(int(first), int(last or first) + 1)
    if not ports or ports[0] < 1 or ports[-1] > 65535:
        raise ValueError("must be one port, or two with the lower one first, all from 1 to 65535")
    return ports


def _endpoint(text: str) -> MetricsAddress | str:
    if not text:
        return ""
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise ValueError("must be a port from 1 to 65535, or HOST:PORT")
    return MetricsAddress(host.removeprefix("[").removesuffix("]") or "127.0.0.1", int(port))


def _path(text: str) -> str:
    """Return the path as an absolute one, because the program may change its folder later; an empty text stays."""
    if not text or os.path.isabs(text):
        return text
    try:
        return os.path.join(os.getcwd(), text)
    except OSError as error:
        raise ValueError(f"the current folder does not exist: {error}") from error


def _path_or_none(text: str) -> str:
    return text if text == NO_FILE else _path(text)


def _algorithms(text: str) -> str:
    if unknown := [name for name in text.split(",") if name and name not in SHM_ALGORITHMS]:
        raise ValueError(f"there is no {unknown[0]!r}; there are {', '.join(SHM_ALGORITHMS)}")
    return text


_positive = _checked(float, "greater than 0", lambda value: value > 0)
_size = _checked(int, "greater than 0", lambda value: value > 0)
_limit = _checked(
    float, f"greater than 0 and at most {MOST_SECONDS:g}", lambda value: 0 < value <= MOST_SECONDS
)
_network = _checked(str, "tcp or mpi", lambda value: value in ("tcp", "mpi"))
_switch = _from_to(0, 1)
_torch_default = _checked(str, "1 or gloo", lambda value: value in ("", "1", "gloo"))

SETTINGS: dict[str, Setting] = {
    "FASTCOLL_TIMEOUT": Setting(_limit, 1800.0, "default timeout of groups and calls, in seconds"),
    "FASTCOLL_WARN_AFTER": Setting(
        _positive, 10.0, "seconds after which a waiting rank logs the ranks that are missing"
    ),
    "FASTCOLL_SHM_BYTES_PER_RANK": Setting(
        _size, 6 << 20, "bytes of shared memory that each rank contributes to a group"
    ),
    "FASTCOLL_TUNING": Setting(
        _path_or_none,
        "",
        "file that keeps tuning results of this machine; default ~/.config/fastcoll/tuning.json; "
        "none: keep no results",
    ),
    "FASTCOLL_SHM_ALGORITHMS": Setting(
        _algorithms,
        "",
        "algorithms that large calls on a node may use, for example direct,close (docs/tuning.md); default: all",
    ),
    "FASTCOLL_SHARED_ARRAYS": Setting(
        _switch,
        0,
        "1: NumPy allocates new arrays of 64 KiB and more in shared memory, from `init_process_group` on",
    ),
    "FASTCOLL_SECRET": Setting(
        str,
        "",
        "the job's secret; both ends of every connection prove that they know it; default: the user's own, in "
        "~/.config/fastcoll/secret",
    ),
    "FASTCOLL_SECRET_FILE": Setting(
        _path, "", "file with the secret, not readable by others; FASTCOLL_SECRET has precedence"
    ),
    "FASTCOLL_INSECURE": Setting(
        _switch,
        0,
        "1: a job that is given no secret uses none, not even the user's own; any process that reaches its ports may "
        "join it",
    ),
    "FASTCOLL_ENCRYPT": Setting(
        _switch,
        0,
        "1: encrypt every TCP connection between processes of the job; the same on all ranks (docs/security.md)",
    ),
    "FASTCOLL_SOCKET_IFNAME": Setting(
        str,
        "",
        "network interfaces to use, for example eth0 or eth0,eth1 or ^docker0; default: GLOO_SOCKET_IFNAME",
    ),
    "FASTCOLL_PORT_RANGE": Setting(
        _ports, "", "ports that ranks listen on, for example 30000-30999; default: any free port"
    ),
    "FASTCOLL_TCP_STREAMS": Setting(
        _from_to(1, MOST_STREAMS), 1, "connections to each peer for large messages"
    ),
    "FASTCOLL_BETWEEN_NODES": Setting(
        _network, "tcp", "the transport of large arrays between nodes with the default backend: tcp or mpi"
    ),
    "FASTCOLL_ELASTIC": Setting(
        str, "", "HOST:PORT of the launcher's store, which outlives the ranks; the launcher sets it"
    ),
    "FASTCOLL_JOINER": Setting(
        _switch, 0, "1: this process replaces a rank that has failed; the launcher sets it"
    ),
    "FASTCOLL_LAUNCHERS": Setting(
        str, "", "HOST:PORT of the store at which the launchers of several nodes meet; the launcher sets it"
    ),
    "FASTCOLL_PLACE": Setting(
        str,
        "",
        "NAME:RANK/SIZE: the launcher's name for this process, the rank that it takes when the ranks first meet, "
        "and the number of ranks; the launcher sets it",
    ),
    "FASTCOLL_TORCH_DEFAULT": Setting(
        _torch_default,
        "",
        "1: fastcoll is torch's default backend for CPU tensors; gloo: it also replaces gloo",
    ),
    "FASTCOLL_UNTESTED_PLATFORM": Setting(
        _switch,
        0,
        "1: run on processors that fastcoll was never tested on (all but x86_64 and aarch64), at your own risk",
    ),
    "FASTCOLL_FAILPOINT": Setting(
        failpoints.parse,
        "",
        "failpoints, where ranks fail on purpose in tests: `NAME:ACTION[=VALUE][@N][#RANK],...` (docs/failpoints.md)",
    ),
    "FASTCOLL_TRACE_DIR": Setting(
        _path, "", "folder into which ranks write their calls and stacks when an error occurs"
    ),
    "FASTCOLL_TRACE_SITES": Setting(
        _switch, 0, "1: the flight record also has the file and line of each collective call"
    ),
    "FASTCOLL_METRICS": Setting(
        _endpoint,
        "",
        "port, or HOST:PORT, at which each node serves metrics for Prometheus (docs/watching.md); "
        "without HOST on loopback only",
    ),
    "FASTCOLL_METRICS_SOCKET": Setting(
        str, "", "name of the socket at which the launcher takes the ranks' records; the launcher sets it"
    ),
    "FASTCOLL_PROFILE_DIR": Setting(
        _path,
        "",
        "folder into which ranks write the times of their calls; `python -m fastcoll profile` sets it",
    ),
    "FASTCOLL_DEBUG": Setting(  # errors.py reads it itself, because this module imports errors.py
        _switch, 0, "1: tracebacks of uncaught errors also show fastcoll's own frames"
    ),
}

_read: dict[str, Any] = {}


def user_folder() -> Path | None:
    """Return fastcoll's settings folder in XDG_CONFIG_HOME or ~/.config; None: no home folder."""
    return _folder_of_user("XDG_CONFIG_HOME", ".config")


def cache_folder() -> Path | None:
    """Return fastcoll's cache folder in XDG_CACHE_HOME or ~/.cache; None: no home folder."""
    return _folder_of_user("XDG_CACHE_HOME", ".cache")


def _folder_of_user(variable: str, in_home: str) -> Path | None:
    """Return `$variable`/fastcoll or `~/in_home/fastcoll`; None: there is no home folder.

    A relative path in the variable is ignored, because ranks may start in different folders. (The XDG specification
    demands this, too.)
    """
    from pathlib import Path  # imported here to keep `import fastcoll` light

    named = os.environ.get(variable, "")
    try:
        folder = Path(named) if os.path.isabs(named) else Path.home() / in_home
    except RuntimeError:  # the user has no database entry, and HOME is not set
        return None
    return folder / "fastcoll" if folder.is_absolute() else None


def get(name: str) -> Any:
    """Return the value of a setting. The first call for a setting reads it from the environment.

    Raises:
        UsageError: the variable's text cannot be parsed.
    """
    if name not in _read:
        setting = SETTINGS[name]
        text = os.environ.get(name)
        try:
            _read[name] = setting.default if text is None else setting.parse(text)
        except ValueError as error:
            raise UsageError(
                f"{name}={text!r} cannot be used ({error}); its meaning: {setting.meaning}"
            ) from error
    return _read[name]


def check() -> None:
    """Read every setting now, so that a bad value is refused at start-up and not at its first use.

    Raises:
        UsageError: a variable's text cannot be parsed.
    """
    for name in SETTINGS:
        get(name)


@functools.cache
def warn_of_unknown() -> None:
    """Warn, once per process, of FASTCOLL_* variables that are not settings. Only one rank of a job calls this."""
    for name, cure in unknown(os.environ).items():
        _log.warning("the environment variable %s is no setting of fastcoll; %s", name, cure)


OF_THE_BUILD = {"FASTCOLL_BUILD_LEVELS", "FASTCOLL_BUILD_URL"}
"""What only the build of a wheel reads (build_backend/); an image may set it for programs, too."""


def unknown(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the FASTCOLL_* variables that are not settings, each with a hint which setting was probably meant."""
    found = {}
    known = SETTINGS.keys() | OF_THE_BUILD
    for name in sorted(name for name in environ if name.startswith(_PREFIX) and name not in known):
        import difflib

        near = difflib.get_close_matches(
            name.removeprefix(_PREFIX), [each.removeprefix(_PREFIX) for each in SETTINGS], 1
        )
        found[name] = f"did you mean {_PREFIX}{near[0]}?" if near else f"there are {', '.join(SETTINGS)}"
    return found


def forget() -> None:
    """Forget all values, so that each setting is read from the environment again."""
    _read.clear()
    warn_of_unknown.cache_clear()
