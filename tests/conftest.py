"""Configuration of all tests: `pytester`, for tests of the pytest plugin, and hosts on this machine.

With CI=true a skipped test fails, unless SKIPPED_IN_CI has the reason; with --no-skips every skipped test fails.
"""

import gc
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
from functools import partial

import pytest
from limits import Limits

from fastcoll.testing.mark import WORKER_PLUGIN

_CONFIG = "-of-fastcoll-tests"
pytest_plugins = ["pytester", "hosts.plugin"]

# Ranks neither use nor change the user's tuning cache, and the user's own secret is neither read nor created, except by
# ranks of a launcher, which must have one. A worker uses its parent's folder.
os.environ.setdefault("FASTCOLL_TUNING", "none")
# OpenBLAS starts threads that spin for a while: an import of NumPy would cost half as much again, in many processes.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
_is_rank = any(name in os.environ for name in ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"))
if not _is_rank and not os.environ.get("XDG_CONFIG_HOME", "").endswith(_CONFIG):
    _folder = tempfile.TemporaryDirectory(suffix=_CONFIG)
    os.environ["XDG_CONFIG_HOME"] = _folder.name

# A shell's background job ignores SIGINT, and one of nohup SIGHUP. Every process that a test starts and signals would
# inherit that; it does not inherit a handler.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
for number in (signal.SIGHUP, signal.SIGQUIT):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, lambda *_: None)

# The beginning of a reason, and why the skip is allowed in CI.
SKIPPED_IN_CI = {
    "numba-cuda is not installed": "a later step of .ci/run has it, and runs these tests",
    "this Numba has no CUDA simulator": "numba-cuda has one, and these need minutes: pytest -m gpu",
    r"needs Numba's simulator \(NUMBA_ENABLE_CUDASIM=1\)": "minutes: pytest -m gpu",
    "no streams": "a test for GPU arrays whose parameters have a case of host arrays",
    "frameworks are not installed": "a later step of .ci/run has them, and runs these tests",
    "these sources are no checkout": "only git knows which files belong to it",
    "the site's tools are not installed": "a later step of .ci/run has them, and runs these tests",
    "Chromium is not installed": ".ci/run installs it where a registry of Debian's packages answers",
    "NCCL is not installed": "a later step of .ci/run has it, and runs these tests",
    r"\d+ ranks need more than \d+ hosts": "the steps on four hosts take the worlds that fit",
    "there is no mpiexec on the PATH": "the step with the other torch has none; the first one has",
    "Slurm is not installed": ".ci/run installs it where a registry of Debian's packages answers",
    "Prometheus is not installed": ".ci/run unpacks it where a registry of Debian's packages answers",
    "no multicast here": "containers' networks often have none",
    "no TUN devices here": "containers often have no /dev/net/tun",
    "seccomp hands no calls to another thread here": "some containers allow it to nobody",
    "this processor has no F16C": "the other way of converting runs everywhere",
    "1,000 connections to oneself need": "the limit of descriptors is the machine's",
}

_RANKS_SECONDS = (
    240.0  # limit of a test in ranks, below the limit of every test (limits.py), which shows less
)

# The tests that `pytest` without arguments omits, by their mark.
LEFT_OUT = {
    "long": "that take long (pytest tests)",
    "timed": "of promised times (-m timed)",
    "slow": "soaks (-m slow)",
    "gpu": "for GPUs (-m gpu)",
    "mpi": "of the conformance suite under mpiexec (-m mpi)",
}
SHORT = " and ".join(f"not {mark}" for mark in LEFT_OUT)
_COUNTS = pytest.StashKey()


@pytest.fixture(scope="session", autouse=True)
def elsewhere(tmp_path_factory):
    """Run outside the sources, which `python -m` and `python -c` would prefer to an installed package."""
    before = os.getcwd()
    os.chdir(tmp_path_factory.mktemp("elsewhere"))
    yield
    os.chdir(before)


@pytest.fixture(autouse=True)
def nobody_speaks():
    """Reset the rank at the beginning of log lines, which a test that joins in this process has set."""
    yield
    logging.getLogger("fastcoll").filters.clear()


def pytest_addoption(parser):
    parser.addoption("--no-skips", action="store_true", help="a test that skips fails, whatever the reason")


def pytest_configure(config):
    """Limit each test; in the ranks of a test the plugin `ranks` has the limit."""
    config.addinivalue_line("markers", "limit(seconds): fail, and show all stacks, after so long")
    if not config.pluginmanager.has_plugin(WORKER_PLUGIN) and not config.option.collectonly:
        with config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            config.pluginmanager.register(Limits())


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """If no path, -k or -m selects tests, omit the slow ones and run three processes, as tests wait a lot."""
    if hasattr(config, "workerinput"):  # a process of xdist has only the arguments of the command line
        config.option.markexpr = config.workerinput["markexpr"]
        return
    if config.pluginmanager.has_plugin("xdist") and config.option.maxworkerrestart is None:
        # After a restart, xdist 3.8 waits for ever for an empty part of the tests.
        config.option.maxworkerrestart = "0"
    chosen = any(word.startswith(("-k", "-m")) for word in config.invocation_params.args)
    if chosen or config.args_source is not config.ArgsSource.TESTPATHS:
        return
    config.option.markexpr = SHORT
    if config.pluginmanager.has_plugin("xdist") and config.option.numprocesses is None:
        config.option.numprocesses, config.option.dist = 3, "loadfile"


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session):
    """For `pytest` without arguments, compile everything on all cores; during the tests one core would compile.

    The kernels with failpoints, which few tests need, are compiled beside the first tests, when a core is idle.
    """
    config = session.config
    if config.option.markexpr != SHORT or hasattr(config, "workerinput"):
        return
    warmup = [sys.executable, "-m", "fastcoll.warmup", "--dtypes"]
    subprocess.run([*warmup, "all", "--njit"], cwd="/", stdout=subprocess.DEVNULL, check=True)
    compiling = subprocess.Popen(
        ["nice", *warmup, "float32,float64"],
        env={**os.environ, "FASTCOLL_FAILPOINT": "shm.barrier.enter:delay=0"},
        cwd="/",
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    config.add_cleanup(partial(_end, compiling))


def _end(process):
    """End a process and its children, unless it has ended."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Mark worlds of more than 3 ranks as long if one of 2 or 3 also runs; count the tests that `pytest` alone omits.

    Ranks may take longer than the plugin's 60 s: on a busy machine compiling a kernel has taken that long.
    """
    for item in items:
        ranks = item.get_closest_marker("ranks")
        if ranks:
            ranks.kwargs.setdefault("timeout", _RANKS_SECONDS)
        if ranks and {2, 3} & {*ranks.args} and item.callspec.params.get("world_size", 0) > 3:
            item.add_marker("long")
    if config.option.markexpr == SHORT:
        counts = {mark: sum(bool(item.get_closest_marker(mark)) for item in items) for mark in LEFT_OUT}
        config.stash[_COUNTS] = counts
        if hasattr(config, "workeroutput"):
            config.workeroutput["left_out"] = counts


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """Pass the expression that selects tests to a process of xdist."""
    node.workerinput["markexpr"] = node.config.option.markexpr


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Take the counts of omitted tests from a process of xdist: the main process collects no tests."""
    if "left_out" in getattr(node, "workeroutput", {}):
        node.config.stash[_COUNTS] = node.workeroutput["left_out"]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session):
    """Print the numbers of omitted tests as the last line."""
    result = yield
    if _COUNTS in session.config.stash and not hasattr(session.config, "workerinput"):
        counts = session.config.stash[_COUNTS]
        told = "; ".join(f"{count} {LEFT_OUT[mark]}" for mark, count in counts.items() if count)
        session.config.get_terminal_writer().line(f"left out: {told}")
    return result


def pytest_collection_finish():
    """Exclude all imported and collected objects from garbage collection.

    Without this, each of the many collections that look for leaks of a test takes half a second.
    """
    gc.collect()
    gc.freeze()


def _refuse_unlisted(report, config):
    """Turn a skip whose reason is not listed into a failure."""
    strict = config.getoption("no_skips")
    if (
        report.outcome != "skipped"
        or hasattr(report, "wasxfail")
        or not (strict or os.environ.get("CI") == "true")
    ):
        return
    reason = report.longrepr[2].removeprefix("Skipped: ")
    if strict or not any(re.match(listed, reason) for listed in SKIPPED_IN_CI):
        report.outcome = "failed"
        report.longrepr = (
            f"{report.nodeid} was skipped in CI, and tests/conftest.py does not list the reason: {reason}"
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    _refuse_unlisted(report, item.config)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    report = yield
    _refuse_unlisted(report, collector.config)
    return report
