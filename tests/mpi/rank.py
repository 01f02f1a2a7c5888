"""One rank of an MPI job that runs tests with the mark `ranks`.

    mpiexec -n 2 python tests/mpi/rank.py tests/conformance

Runs, in this process, the tests for as many ranks as the job has. All ranks run the same test at the same time, and
then exchange the outcomes, so that a test fails on all of them if it fails on one; rank 0 prints.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from _pytest.runner import runtestprotocol
from mpi4py import MPI

import fastcoll
from fastcoll.config import forget
from fastcoll.testing.mark import WORKER_PLUGIN, RanksMark

_TEST_SECONDS = 200.0  # only a hang takes so long
_WORLD: Any = MPI.COMM_WORLD


class Rank:
    """The plugin: it replaces the one that runs ranks in processes of their own."""

    def __init__(self) -> None:
        self.__name__ = WORKER_PLUGIN
        self.task = SimpleNamespace(rank=_WORLD.rank)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        kept = [item for item in items if _is_ours(item)]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        forget()  # an earlier test may have set FASTCOLL_* variables
        faulthandler.dump_traceback_later(_TEST_SECONDS, exit=True)
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        problems = [f"{r.when}: {r.longreprtext}" for r in reports if r.failed]
        everybody = _WORLD.allgather((item.nodeid, "\n".join(problems)))
        faulthandler.cancel_dump_traceback_later()
        _share(reports, everybody)
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if _mark(item).init:
            fastcoll.init_process_group("mpi", timeout=_TEST_SECONDS / 2)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self) -> None:
        # After a failure too: the others learn of it, and end the test.
        if fastcoll.is_initialized():
            fastcoll.destroy_process_group()

    @pytest.fixture
    def tmp_path(self, tmp_path: Path) -> Path:
        """One directory for all ranks."""
        return Path(_WORLD.bcast(tmp_path))


def _mark(item: pytest.Item) -> RanksMark:
    mark = item.get_closest_marker("ranks")
    assert mark is not None
    return RanksMark.parse(mark.args, mark.kwargs)


def _is_ours(item: pytest.Item) -> bool:
    if item.get_closest_marker("ranks") is None or not isinstance(item, pytest.Function):
        return False
    mark = _mark(item)
    # Tests that kill ranks would end the job; tests of other backends run elsewhere.
    return item.callspec.params["world_size"] == _WORLD.size and not mark.fresh and mark.backend is None


def _share(reports: list[pytest.TestReport], everybody: list[tuple[str, str]]) -> None:
    """Fail the test here if it failed on another rank, or another rank ran another test."""
    texts = [f"--- rank {rank} of {_WORLD.size}\n{text}" for rank, (_, text) in enumerate(everybody) if text]
    if len({name for name, _ in everybody}) > 1:
        texts.append(f"the ranks run different tests: {everybody}")
    if texts:
        report = next((r for r in reports if r.failed), reports[-1])
        report.outcome, report.longrepr = "failed", "\n".join(texts)


def main(args: list[str]) -> int:
    """Run pytest with these arguments, on the tests for a job of this size."""
    if _WORLD.rank != 0:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        args = [arg for arg in args if not arg.startswith("--junitxml")]
    # No plugins by entry points: ours would make pytest rewrite all of fastcoll, and Hypothesis' would import it.
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    options = ["-p", "fastcoll.testing.plugin", "-p", "no:cacheprovider"]
    options += ["-o", "addopts=--import-mode=importlib"]
    # This file imports fastcoll, which is also a plugin of pytest, before pytest can.
    options += ["-W", "ignore:Module already imported so cannot be rewritten"]
    # A directory for each rank: pytest cleans up a common one, where ranks would disturb each other.
    with tempfile.TemporaryDirectory() as folder:
        code = int(pytest.main([*args, *options, f"--basetemp={folder}/rank"], plugins=[Rank()]))
    if code > pytest.ExitCode.TESTS_FAILED:
        _WORLD.Abort(code)  # other ranks may be in a test, and MPI_Finalize would wait for them
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
