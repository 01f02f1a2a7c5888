"""`run`: call a function in new ranks, from a notebook, a script or a shell.

A function that a rank cannot import (a lambda, a closure, anything of `__main__`) is pickled by value, with the
cloudpickle of Numba. So ranks can be fresh interpreters that do not run the caller's main module again. Unlike forked
processes, they inherit nothing of the caller's threads, JAX and CUDA. Ranks write their results and errors into memfds,
so no files are left. The launcher's supervisor starts and watches the ranks (supervisor.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import linecache
import mmap
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

from ..compiler.undisturbed import undisturbed
from ..core.work import Timeout
from ..errors import UsageError, follows
from ..metrics import in_launcher
from .lifeline import GRACE_SECONDS
from .nodes import NodeShare, free_port, python_main
from .ranks import RankProcess
from .spawn import ProcessExitedError, ProcessRaisedError, check_call
from .supervisor import Supervisor


def run(
    fn: Callable[..., Any],
    ranks: int = 4,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    backend: str | None = None,
    timeout: Timeout = None,
    prefix: bool = True,
) -> list[Any]:
    """Call `fn(*args, **kwargs)` in `ranks` new processes, each a rank of one world, and return their results.

    `fn` may be a lambda, a closure or a function of a notebook. The function, its arguments and its results are sent by
    pickle. Each rank calls `init_process_group` before `fn` and leaves the job when `fn` returns. The ranks' output
    goes to this process's `sys.stdout` and `sys.stderr`.

    Args:
        backend, timeout: as for `init_process_group`.
        prefix: whether each line of output begins with its rank, for example `[1] `.

    Returns:
        the results of `fn`, by rank.

    Raises:
        UsageError: an argument is wrong, or cannot be pickled, or a result cannot be loaded.
        ProcessRaisedError: `fn` raised in a rank; the message has the traceback, and `__cause__` is the exception. If
            several ranks failed, the error names the rank whose failure caused the others. The other ranks have been
            ended.
        ProcessExitedError: a signal ended a rank, or a rank exited before `fn` returned or raised.

    Examples:
        >>> def total(x):
        ...     dist.all_reduce(x)
        ...     return x
        >>> dist.run(total, ranks=2, args=(np.ones(3),))  # [array([2., 2., 2.]), array([2., 2., 2.])]
    """
    if not callable(fn):
        raise UsageError(f"run: fn must be a function, got {type(fn).__name__}; give it without calling it")
    if type(ranks) is not int or ranks < 1:
        raise UsageError(f"run: ranks must be an int from 1 up, got {ranks!r}")
    check_call("run", args)
    task = _pickled(fn, args, kwargs, backend, timeout)
    with contextlib.ExitStack() as open_files:
        metrics = open_files.enter_context(in_launcher.serving())
        files = [open_files.enter_context(_memory_file()) for _ in range(ranks + 1)]
        with open(files[0], "wb", closefd=False) as stream:
            stream.write(task)
        numbers = tuple(map(str, files))
        port = free_port()
        job = NodeShare(
            python_main(__name__), ranks, 1, 0, "127.0.0.1", port, numbers, descriptors=tuple(files),
            metrics="" if metrics is None else metrics.socket,
        )  # fmt: skip
        supervisor = Supervisor(
            job,
            GRACE_SECONDS,
            prefix,
            sinks=(_writer(sys.stdout), _writer(sys.stderr)),
            is_guest=True,
            metrics=metrics,
            followed=lambda rank: isinstance(end := _read(files[1 + rank.rank]), _Raised) and end.follows,
        )
        supervisor.run()
        return _results(supervisor.ranks, files[1:], supervisor.first.rank if supervisor.first else None)


def _pickled(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    backend: str | None,
    timeout: Timeout,
) -> bytes:
    """Return what `main` loads: the source of what was typed, the function, its arguments, and those of the world.

    Raises:
        UsageError: something cannot be pickled.
    """
    cloudpickle = _cloudpickle()
    # Notebooks and shells keep the source of their cells in `linecache`. Ranks get it too, for tracebacks.
    typed = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}
    module = sys.modules.get(getattr(fn, "__module__", ""))
    lost = module is not None and hasattr(module, "__file__") and not _is_importable(module)
    try:
        if lost:
            cloudpickle.register_pickle_by_value(module)
        task: bytes = cloudpickle.dumps((typed, fn, tuple(args), dict(kwargs or {}), backend, timeout))
        return task
    except Exception as error:
        raise UsageError(
            f"run: {getattr(fn, '__qualname__', fn)!r}, what it refers to, or its arguments cannot be pickled: {error}"
        ) from error
    finally:
        if lost:
            cloudpickle.unregister_pickle_by_value(module)


@contextlib.contextmanager
def _memory_file() -> Iterator[int]:
    """Open a file in memory that ranks inherit, and yield its descriptor."""
    # It has the same number in the ranks, so it is above those of standard streams, which may be closed here.
    lowest = os.memfd_create("fastcoll-run")
    with open(lowest, "rb"):
        file = fcntl.fcntl(lowest, fcntl.F_DUPFD_CLOEXEC, 3)
    try:
        yield file
    finally:
        os.close(file)


def _is_importable(module: ModuleType) -> bool:
    """Return whether a rank can import a module.

    It cannot if the module is not on sys.path, for example because pytest has imported it by its file name.
    """
    spec = PathFinder.find_spec(module.__name__.partition(".")[0])
    paths = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())]
    return any(path and str(module.__file__).startswith(path) for path in paths)


def _results(ranks: Sequence[RankProcess], outcomes: Sequence[int], first: int | None) -> list[Any]:
    """Return every rank's result, or raise the error of the rank at fault.

    The rank at fault is the first rank whose failure was not caused by another rank's failure. `first` is the rank that
    the supervisor has named as the first that failed.
    """
    ends = [_read(outcome) for outcome in outcomes]
    order = sorted(range(len(ends)), key=lambda rank: (rank != first, rank))
    for follower in (False, True):
        for rank in order:
            if isinstance(outcome := ends[rank], _Raised) and outcome.follows is follower:
                raise ProcessRaisedError(rank, ranks[rank].process.pid, outcome.text) from outcome.error
        for rank in order:
            process, outcome = ranks[rank].process, ends[rank]
            # `first` may have failed after it wrote its result. The other ranks were ended because of its failure.
            failed = rank == first and not isinstance(outcome, _Raised)
            if failed or (outcome is None and process.returncode == 0):
                raise ProcessExitedError(rank, process.pid, process.returncode)
            if isinstance(outcome, _Unloadable) and process.returncode == 0:
                raise UsageError(
                    f"run: the result of rank {rank} can be pickled but not loaded: {outcome.error!r}"
                ) from outcome.error
    return [outcome[0] for outcome in ends]


def _cloudpickle() -> Any:
    def load() -> Any:
        from numba import cloudpickle  # its import takes 0.4 s

        return cloudpickle

    return undisturbed(load)


class _Raised:
    """An exception in a rank: its traceback, the exception if that can be pickled, and whether it `follows`."""

    def __init__(self, error: Exception) -> None:
        trace = error.__traceback__ and error.__traceback__.tb_next  # without the frame of `main`
        self.text = "".join(traceback.format_exception(type(error), error, trace))
        self.follows = follows(error)
        self._pickled = b""
        with contextlib.suppress(Exception):
            self._pickled = _cloudpickle().dumps(error)

    @property
    def error(self) -> BaseException | None:
        """The exception, or None if it could not be pickled."""
        with contextlib.suppress(Exception):
            error = _cloudpickle().loads(self._pickled)
            return error if isinstance(error, BaseException) else None
        return None


@dataclass(frozen=True)
class _Unloadable:
    """An outcome that is incomplete, or cannot be loaded because of this error."""

    error: Exception


def _writer(stream: TextIO | None) -> Callable[[bytes], None]:
    """Return a function that writes to the stream; None: the stream was closed when Python started."""

    def write(data: bytes) -> None:
        if stream is None:
            return
        stream.write(data.decode(errors="replace"))
        stream.flush()

    return write


def _write(file: int, outcome: Any) -> None:
    """Write the outcome of a rank, unless an error was written before."""
    if not os.fstat(file).st_size:
        try:
            with open(file, "wb", closefd=False) as stream:
                _cloudpickle().dump(outcome, stream)
        except BaseException:
            os.ftruncate(file, 0)
            os.lseek(file, 0, os.SEEK_SET)
            raise


def _read(file: int) -> Any:
    """Return the outcome that a rank has written; None: it is missing."""
    if not os.fstat(file).st_size:
        return None
    with mmap.mmap(file, 0, access=mmap.ACCESS_READ) as data:
        try:
            return _cloudpickle().loads(data)
        except Exception as error:
            return _Unloadable(error)


def main(task: int, *outcomes: int) -> int:
    """Run the function in one rank and write its outcome; return the exit code."""
    from ..job.world import world

    cloudpickle = _cloudpickle()
    outcome = outcomes[int(os.environ["RANK"])]
    try:
        typed, fn, args, kwargs, backend, timeout = cloudpickle.loads(
            Path(f"/proc/self/fd/{task}").read_bytes()
        )
        linecache.cache.update(typed)
        with world(backend, timeout=timeout):
            try:
                result = fn(*args, **kwargs)
            except Exception as error:
                _write(outcome, _Raised(error))  # before the other ranks fail because of this rank
                raise
        try:
            _write(outcome, (result,))
        except Exception as error:
            raise UsageError(
                f"run: the result, a {type(result).__name__}, cannot be pickled: {error}"
            ) from error
    except KeyboardInterrupt:
        return 130  # the caller gets Ctrl-C too, and reports it
    except Exception as error:
        _write(outcome, _Raised(error))
        return 1
    return 0
