"""Configuration of all tests: `pytester`, with which the pytest plugin tests itself, and hosts on this machine.

Where CI=true a test that skips fails, unless SKIPPED_IN_CI has the reason; with --no-skips any that skips does.
"""

import gc
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile

import pytest
from limits import Limits

from fastcoll.testing.mark import WORKER_PLUGIN

_CONFIG = "-of-fastcoll-tests"
pytest_plugins = ["pytester", "hosts.plugin"]

# Ranks neither begin with what an earlier run has learned nor leave anything to the user's next one, nor is the user's
# own secret read or made: but by ranks of a launcher, which must have one. A worker has its parent's folder.
os.environ.setdefault("FASTCOLL_TUNING", "none")
_is_rank = any(name in os.environ for name in ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"))
if not _is_rank and not os.environ.get("XDG_CONFIG_HOME", "").endswith(_CONFIG):
    _folder = tempfile.TemporaryDirectory(suffix=_CONFIG)
    os.environ["XDG_CONFIG_HOME"] = _folder.name

# A shell's background job ignores Ctrl-C, and one of nohup hanging up; so would every process that a test starts and
# signals, as it inherits that, but not a handler.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
for number in (signal.SIGHUP, signal.SIGQUIT):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, lambda *_: None)

# What a reason begins with, and why it may be so in CI.
SKIPPED_IN_CI = {
    "numba-cuda is not installed": "a later step of .ci/run has it, and runs these tests",
    "this Numba has no CUDA simulator": "numba-cuda has one, and these need minutes: pytest -m gpu",
    r"needs Numba's simulator \(NUMBA_ENABLE_CUDASIM=1\)": "minutes: pytest -m gpu",
    "no streams": "a test for GPU arrays whose parameters have a case of host arrays",
    "frameworks are not installed": "a later step of .ci/run has them, and runs these tests",
    "NCCL is not installed": "a later step of .ci/run has it, and runs these tests",
    r"\d+ ranks need more than \d+ hosts": "the steps on four hosts take the worlds that fit",
    "there is no mpiexec on the PATH": "the step with the other torch has none; the first one has",
    "Slurm is not installed": ".ci/run installs it where a registry of Debian's packages answers",
    "no multicast here": "containers' networks often have none",
    "no TUN devices here": "containers often have no /dev/net/tun",
    "seccomp hands no calls to another thread here": "some containers allow it to nobody",
    "this processor has no F16C": "the other way of converting runs everywhere",
    "1,000 connections to oneself need": "the limit of descriptors is the machine's",
}

_RANKS_SECONDS = (
    240.0  # that a test of ranks may take; below the limit of any test (limits.py), which shows less
)

# What `pytest` alone leaves out, by its mark.
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
    """Be away from the sources, which `python -m` and `python -c` in tests would find before an installed package.

    Their kernels have another place in the cache, and would be compiled once more.
    """
    before = os.getcwd()
    os.chdir(tmp_path_factory.mktemp("elsewhere"))
    yield
    os.chdir(before)


@pytest.fixture(autouse=True)
def nobody_speaks():
    """What a test that meets others in this process leaves: the rank at the beginning of what is logged."""
    yield
    logging.getLogger("fastcoll").filters.clear()


def pytest_addoption(parser):
    parser.addoption("--no-skips", action="store_true", help="a test that skips fails, whatever the reason")


def pytest_configure(config):
    """Limit each test, but not in the ranks of a test, whose limit the plugin `ranks` has."""
    config.addinivalue_line("markers", "limit(seconds): fail, and show all stacks, after so long")
    if not config.pluginmanager.has_plugin(WORKER_PLUGIN) and not config.option.collectonly:
        with config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            config.pluginmanager.register(Limits())


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Where no test is chosen by a path, -k or -m, leave out what takes long, and run two lanes, which wait a lot."""
    if hasattr(config, "workerinput"):  # a lane has only the words of the command line
        config.option.markexpr = config.workerinput["markexpr"]
        return
    chosen = any(word.startswith(("-k", "-m")) for word in config.invocation_params.args)
    if chosen or config.args_source is not config.ArgsSource.TESTPATHS:
        return
    config.option.markexpr = SHORT
    if config.pluginmanager.has_plugin("xdist") and config.option.numprocesses is None:
        config.option.numprocesses, config.option.dist = 2, "loadfile"


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session):
    """For `pytest` alone compile everything with all cores: under the tests one would, and the others wait."""
    if session.config.option.markexpr != SHORT or hasattr(session.config, "workerinput"):
        return
    with tempfile.TemporaryDirectory() as elsewhere:
        for more in ({}, {"FASTCOLL_FAILPOINT": "shm.barrier.enter:delay=0"}):
            command = [sys.executable, "-m", "fastcoll.warmup", "--dtypes", "all"]
            environment = {**os.environ, **more}
            subprocess.run(command, env=environment, cwd=elsewhere, stdout=subprocess.DEVNULL, check=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Mark worlds of more than 3 ranks, where one of 2 or 3 runs, too; count what `pytest` alone leaves out.

    Ranks may take longer than the plugin's 60 s: on a busy machine a kernel that a test compiles has taken that long.
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
    """Give a lane the expression that selects its tests."""
    node.workerinput["markexpr"] = node.config.option.markexpr


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Learn from a lane what it has left out: the process that shows results collects nothing."""
    if "left_out" in getattr(node, "workeroutput", {}):
        node.config.stash[_COUNTS] = node.workeroutput["left_out"]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session):
    """Say what `pytest` alone has left out, as the last line."""
    result = yield
    if _COUNTS in session.config.stash and not hasattr(session.config, "workerinput"):
        counts = session.config.stash[_COUNTS]
        told = "; ".join(f"{count} {LEFT_OUT[mark]}" for mark, count in counts.items() if count)
        session.config.get_terminal_writer().line(f"left out: {told}")
    return result


def pytest_collection_finish():
    """What has been imported and collected stays until the end.

    Without this, each of the many collections that look for what a test leaves takes half a second.
    """
    gc.collect()
    gc.freeze()


def _refuse_unlisted(report, config):
    """Make a failure of a skip that nobody expects."""
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
