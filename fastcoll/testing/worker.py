"""A rank of the pytest plugin's pool: a pytest session that runs the tests that the parent sends.

The worker collects each test itself, so fixtures, parameters, classes, conftest files and assertion rewriting work as
in any test. Each rank sets up its own fixtures, but tmp_path is one directory for all. stdout and stderr go to a memory
file of the parent, so the parent has the output even if this process is killed.

The threads, file descriptors and child processes that a test leaves behind are found by comparing a Footprint from
before the test with one from after it. New ones get two seconds to disappear, because threads and children end a moment
after they were asked to, or later if they get no core.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from ..launch.lifeline import children_of, die_with_parent
from ..system.processes import session
from .mark import WORKER_PLUGIN, RankResult, Setup, Task

_SHM = Path("/dev/shm")
_GONE_SECONDS = 2.0
_INTERVAL = 0.02


class RankWorker:
    """The plugin that turns a pytest session into a worker."""

    def __init__(self, parent: Connection[Any, Any], setup: Setup) -> None:
        self.__name__ = WORKER_PLUGIN  # the name under which pytest registers a plugin
        self.parent = parent
        self.setup = setup
        self.task: Task | None = None
        self._items: dict[str, list[pytest.Item]] = {}
        self._reports: list[pytest.TestReport | pytest.CollectReport] = []
        self._error: BaseException | None = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> None:
        for name, pickled in self.setup.options.items():
            with contextlib.suppress(Exception):  # its class cannot be imported here
                setattr(config.option, name, pickle.loads(pickled))

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> bool:
        return True  # nothing is collected before the parent sends tests

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.parent.send("ready")
        while True:
            try:
                task = self.parent.recv()
            except EOFError:
                return True
            result = self._run(session, task)
            sys.stdout.flush()
            self.parent.send(result)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._reports.append(report)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.failed and str(report.longrepr).startswith("[XPASS(strict)]"):
            report.outcome, report.longrepr = "passed", None  # another rank may have failed as expected
        if report.failed and self._error is None and call.excinfo is not None:
            self._error = call.excinfo.value
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        if self.task is not None and self.task.mark.init:
            import fastcoll

            fastcoll.init_process_group(self.task.mark.backend)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self) -> Generator[None, None, None]:
        yield
        # After a failure the process is killed, and destroying the group could wait for other ranks.
        has_failed = any(report.failed or _is_expected(report) for report in self._reports)
        if self.task is not None and self.task.mark.init and not has_failed:
            import fastcoll

            if fastcoll.is_initialized():
                fastcoll.destroy_process_group()

    @pytest.fixture
    def tmp_path(self) -> Path:
        """Return a temporary directory that all ranks of the test share."""
        if self.task is None or self.task.tmp_path is None:
            raise pytest.UsageError("a test with the ranks mark takes tmp_path as an argument of its own")
        return Path(self.task.tmp_path)

    def _run(self, session: pytest.Session, task: Task) -> RankResult:
        from ..config import forget

        forget()  # an earlier test may have set FASTCOLL_* variables
        self._reports.clear()
        self._error = None
        item = self._collect(session, task)
        if item is None:
            return self._result(task)
        before, environment = Footprint.now(), dict(os.environ)
        os.environ.update(task.environment)
        self.task = task
        try:
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        except (KeyboardInterrupt, pytest.exit.Exception) as error:
            self._error = error
        finally:
            self.task = None
            os.environ.clear()
            os.environ.update(environment)
        result = self._result(task)
        if result.outcome == "passed" and (leaks := lasting(before.growth)):
            return RankResult(task.rank, "leaked", "left behind after the test: " + "; ".join(leaks))
        return result

    def _collect(self, session: pytest.Session, task: Task) -> pytest.Item | None:
        if task.file not in self._items:
            try:
                _offer_conftests(session.config)
                self._items[task.file] = list(session.perform_collect([task.file]))
            except pytest.UsageError as error:
                self._error = error
            # The objects of imported modules are never freed, so garbage collections need not traverse them.
            gc.collect()
            gc.freeze()
        found = [item for item in self._items.get(task.file, []) if item.nodeid == task.nodeid]
        if not found and self._error is None:
            self._error = pytest.UsageError(
                f"{task.nodeid} is not among the tests that this rank collects from {task.file}; "
                "parameters must be the same in every process"
            )
        return found[0] if found else None

    def _result(self, task: Task) -> RankResult:
        from ..errors import follows

        failed = [report for report in self._reports if report.failed]
        expected = [report for report in self._reports if _is_expected(report)]
        skipped = [report for report in self._reports if report.skipped and not _is_of_subtest(report)]
        if failed or (self._error is not None and not skipped):
            text = "\n".join(map(_text, failed)) or "".join(traceback.format_exception(self._error))
            cause = _cause(failed[0].longrepr) if failed else text
            summary = f"{type(self._error).__name__}: {self._error}".partition("\n")[0]
            return RankResult(task.rank, "failed", summary, text, cause, follows(self._error))
        if expected:
            reason: Any = getattr(expected[0], "wasxfail", "")
            return RankResult(task.rank, "xfailed", reason.removeprefix("reason: "))
        if skipped:
            reason = skipped[0].longrepr
            text = str(reason[2] if isinstance(reason, tuple) else reason)
            return RankResult(task.rank, "skipped", text.removeprefix("Skipped: "))
        return RankResult(task.rank, "passed")


def _offer_conftests(config: pytest.Config) -> None:
    """Have pytest look for the fixtures of conftest files again at the next collection.

    Since pytest 9.1 these fixtures belong to the node of the conftest file's folder, and each collection makes new
    nodes. The fixtures of the root folder belong to the session and stay registered.
    """
    fixtures: Any = config.pluginmanager.get_plugin("funcmanage")
    for name, plugin in config.pluginmanager.list_name_plugin():
        if name.endswith("conftest.py") and config.rootpath in Path(name).parent.parents:
            fixtures.pytest_plugin_registered(plugin=plugin, plugin_name=name)


def _is_of_subtest(report: pytest.TestReport | pytest.CollectReport) -> bool:
    return hasattr(report, "context")  # SubtestReport is not public before pytest 9


def _is_expected(report: pytest.TestReport | pytest.CollectReport) -> bool:
    """Return whether a report is that of a test that has failed as expected (xfail)."""
    return report.skipped and hasattr(report, "wasxfail") and not _is_of_subtest(report)


def _text(report: pytest.TestReport | pytest.CollectReport) -> str:
    stage = "" if report.when == "call" else f"(in {report.when})\n"
    logs = "".join(f"\n--- {title} ---\n{text}" for title, text in report.sections if "log" in title)
    return stage + report.longreprtext + logs


def _cause(longrepr: Any) -> str:
    """Return the line of every frame and the message, which are equal on ranks that failed in the same way.

    The traceback itself differs between ranks, because it shows the test's arguments.
    """
    entries = getattr(getattr(longrepr, "reprtraceback", None), "reprentries", ())
    places = [getattr(entry, "reprfileloc", None) for entry in entries]
    crash = getattr(longrepr, "reprcrash", None)
    return "\n".join([*(f"{at.path}:{at.lineno}" for at in places if at), str(crash or longrepr)])


@dataclass(frozen=True)
class Footprint:
    """What this process has: names of threads by ident, targets of descriptors, commands of children by pid."""

    threads: dict[int, str]
    files: dict[int, str]
    children: dict[int, str]

    @staticmethod
    def now() -> Footprint:
        # A _DummyThread is a C++ thread, such as XLA's, that has called Python once; no test can end it.
        threads = {
            thread.ident or 0: thread.name
            for thread in threading.enumerate()
            if type(thread).__name__ != "_DummyThread"
        }
        files = {}
        arena = sys.modules.get("fastcoll.shm.arena")
        kept = {str(arena.descriptor())} if arena else set()  # the arena is open until the process ends
        for name in set(os.listdir("/proc/self/fd")) - kept:
            with suppress(FileNotFoundError):  # the descriptor with which listdir has read the directory
                files[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        return Footprint(threads, files, {pid: _command(pid) for pid in children_of(os.getpid())})

    def growth(self) -> list[str]:
        """Return what the process has now and is not in this Footprint, one line each."""
        now = Footprint.now()
        lines = [f"thread {name!r}" for ident, name in now.threads.items() if ident not in self.threads]
        opened = {fd: to for fd, to in now.files.items() if self.files.get(fd) != to}
        # At its first use CUDA opens files, which it keeps until the process ends.
        if not any(to.startswith("/dev/nvidia") for to in opened.values()):
            lines += [f"descriptor {fd} ({to})" for fd, to in opened.items()]
        lines += [f"child {pid} ({name})" for pid, name in now.children.items() if pid not in self.children]
        return lines


def lasting(look: Callable[[], list[str]]) -> list[str]:
    """Return what `look` still finds after two seconds and garbage collections."""
    found, end = look(), time.monotonic() + _GONE_SECONDS
    if found:
        gc.collect()
        while (found := look()) and time.monotonic() < end:
            time.sleep(_INTERVAL)
    if found:  # a thread that has ended meanwhile may have left a reference cycle
        gc.collect()
        found = look()
    return found


def clock_at_work() -> float:
    """Return the seconds of a clock that stops while this thread waits for a core, and runs while it sleeps."""
    waited = Path("/proc/thread-self/schedstat").read_text().split()[1]  # ns on the run queue
    return time.monotonic() - int(waited) / 1e9


def shm_names(folder: Path = _SHM) -> set[str]:
    """Return the names of the segments of this pytest session, in the folder under which /dev/shm is visible."""
    try:
        entries = list(os.scandir(folder))
    except FileNotFoundError:
        return set()
    found = set()
    for entry in entries:
        with suppress(FileNotFoundError):  # it was removed meanwhile
            ours = entry.name.startswith("fastcoll") and entry.name.endswith(session())
            if ours and entry.stat(follow_symlinks=False).st_uid == os.getuid():
                found.add(entry.name)
    return found


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "ended, not waited for"


def main(parent: int, descriptor: int, stacks: int) -> int:
    """Serve the pytest process `parent` over the connection `descriptor` until the parent closes it.

    Args:
        stacks: the descriptor to which SIGUSR1 writes the stacks of all threads.
    """
    die_with_parent(parent)
    os.set_inheritable(descriptor, False)
    os.set_inheritable(stacks, False)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    connection: Connection[Any, Any] = Connection(descriptor)
    with connection:
        setup: Setup = connection.recv()
        return int(pytest.main(setup.args, plugins=[RankWorker(connection, setup)]))
