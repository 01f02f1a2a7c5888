"""pytest plugin: `@pytest.mark.ranks(4)` runs a test in four processes, each a rank of one world.

    @pytest.mark.ranks(1, 2, 4)
    def test_sum(rank, world_size):
        x = np.full(3, rank)
        fastcoll.all_reduce(x)
        assert (x == sum(range(world_size))).all()

The plugin does not change tests without the mark. RanksMark lists the options; worker.py explains how a rank runs a
test. Each rank sets up its own fixtures for each test, whatever their scope. Another plugin may implement the hook
`pytest_ranks_places` to run ranks elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest

from ..errors import UsageError
from ..launch.nodes import free_ports
from ..system.processes import SESSION
from .mark import WORKER_PLUGIN, Place, RanksMark, Setup, Task, failure_text, skip_reason, xfail_reason
from .pool import Pool
from .worker import lasting, shm_names

_HELP = (
    "ranks(n, ..., init=True, backend=None, timeout=60, fresh=False, may_die=()): run the test in n "
    "processes, once for each n given, with fastcoll initialised; its arguments may be rank, world_size "
    "and one tmp_path for all"
)
# Options that are not passed to workers: those for output, files and debugging, and those of plugins that spawn
# processes or repeat tests.
_PARENT_OPTIONS = """
    basetemp cacheclear capture collectonly debug file_or_dir log_cli_level log_file log_file_mode maxfail pastebin
    plugins setuponly setupplan setupshow trace usepdb usepdb_cls xmlpath
    dist maxprocesses maxworkerrestart numprocesses px tx reruns
"""
# Plugins that write into pytest's cache which tests have run or failed; only the parent knows that of a whole test.
_CACHE_WRITERS = ("lfplugin", "nfplugin", "stepwise")
_PORTS = 50  # how many free ports are drawn at once


class RanksHooks:
    """The hooks that other plugins may implement."""

    @pytest.hookspec(firstresult=True)
    def pytest_ranks_places(self, config: pytest.Config, world_size: int) -> Sequence[Place] | None:
        """Return a place for each rank of a test.

        None leaves the decision to other plugins; if all return None, the ranks run on this machine.
        """


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.add_hookspecs(RanksHooks)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("fastcoll").addoption(
        "--ranks-backend",
        metavar="NAME",
        help="the backend of tests with the mark ranks that do not name one (default: auto)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _HELP)
    if hasattr(config, "workerinput"):  # with pytest-xdist, each xdist worker has a session of its own
        os.environ.pop(SESSION, None)
    os.environ.setdefault(SESSION, secrets.token_hex(4))  # inherited by all processes that this one starts
    backend = config.getoption("ranks_backend")
    if backend is not None:
        from ..job.backends import parse_backend

        try:
            parse_backend(backend)
        except UsageError as error:
            raise pytest.UsageError(f"--ranks-backend: {error}") from error
    if not config.pluginmanager.has_plugin(WORKER_PLUGIN):
        config.pluginmanager.register(RanksRunner(config), "fastcoll-ranks-runner")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    mark = _mark_of(metafunc.definition)
    if mark is None:
        return
    if "world_size" not in metafunc.fixturenames:
        metafunc.fixturenames.append("world_size")
    metafunc.parametrize("world_size", mark.sizes, indirect=True, ids=[f"n{n}" for n in mark.sizes])


@pytest.fixture
def world_size(request: pytest.FixtureRequest) -> int:
    """The number of ranks that run this test."""
    size: int | None = getattr(request, "param", None)
    if size is None:
        raise pytest.UsageError("world_size is for tests with the mark @pytest.mark.ranks(n)")
    return size


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> int:
    """This process's rank."""
    worker = request.config.pluginmanager.get_plugin(WORKER_PLUGIN)
    task: Task | None = getattr(worker, "task", None)
    if task is None:
        raise pytest.UsageError("rank is for tests with the mark @pytest.mark.ranks(n)")
    return task.rank


class RanksRunner:
    """The plugin in pytest's process: it passes marked tests to the pool and combines the ranks' results."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._setup: Setup
        self._pool: Pool | None = None
        self._ports: list[int] = []  # a new one for each test, because the last test's may still be in use

    def pytest_sessionstart(self) -> None:
        # A conftest file that is imported later may take the name of one whose classes the options have.
        self._setup = _setup_of(self._config)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if _mark_of(item) is None:
            return
        if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
            pytest.fail(
                "ranks is for functions and for methods of plain classes, not of unittest.TestCase", False
            )
        # The ranks set up all other fixtures; only the directory that they share is made here.
        item.fixturenames = [name for name in item.fixturenames if name == "tmp_path"]

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        mark = _mark_of(pyfuncitem)
        if mark is None:
            return None
        config, size = self._config, pyfuncitem.callspec.params["world_size"]
        assert isinstance(size, int), "the mark's"
        places = config.hook.pytest_ranks_places(config=config, world_size=size) or [Place()] * size
        mark = replace(mark, backend=mark.backend or config.getoption("ranks_backend"))
        segments = _segments(places)
        self._pool = self._pool or Pool(self._setup)
        self._ports = self._ports or free_ports(_PORTS)
        results = self._pool.run(_tasks(pyfuncitem, mark, places, self._ports.pop()))
        if (reason := xfail_reason(results)) is not None:
            pytest.xfail(reason)
        left = lasting(lambda: sorted(_segments(places) - segments))
        complaints = [failure_text(results, size)]
        complaints += [f"left in shared memory after the test: {', '.join(left)}"] if left else []
        text = "\n\n".join(filter(None, complaints))
        if text:
            for result in results:
                if result.output:
                    pyfuncitem.add_report_section("call", f"output of rank {result.rank}", result.output)
            pytest.fail(text, pytrace=False)
        if (reason := skip_reason(results)) is not None:
            pytest.skip(reason)
        return True

    def pytest_unconfigure(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None


def _segments(places: Iterable[Place]) -> set[str]:
    """Return the paths of this session's shared memory segments at these places."""
    return {str(shm / name) for shm in {place.shm for place in places} for name in shm_names(shm)}


def _mark_of(item: pytest.Item) -> RanksMark | None:
    mark = item.get_closest_marker("ranks")
    if mark is None:
        return None
    try:
        return RanksMark.parse(mark.args, mark.kwargs)
    except UsageError as error:
        pytest.fail(f"{item.nodeid}: {error}", pytrace=False)


def _tasks(item: pytest.Function, mark: RanksMark, places: Sequence[Place], port: int) -> list[Task]:
    shared = {
        "WORLD_SIZE": str(len(places)),
        "MASTER_ADDR": places[0].address,
        "MASTER_PORT": str(port),
        "FASTCOLL_SECRET": os.environ.get("FASTCOLL_SECRET") or secrets.token_hex(32),
    }
    folder = None if (tmp_path := item.funcargs.get("tmp_path")) is None else str(tmp_path)
    tasks = []
    for rank, place in enumerate(places):
        neighbours = [other for other, its in enumerate(places) if its == place]
        own = {"RANK": rank, "LOCAL_RANK": neighbours.index(rank), "LOCAL_WORLD_SIZE": len(neighbours)}
        environment = {**shared, **{name: str(number) for name, number in own.items()}}
        tasks.append(Task(str(item.path), item.nodeid, rank, mark, environment, place, folder))
    return tasks


def _setup_of(config: pytest.Config) -> Setup:
    """Return the command line of a worker, with the configuration, conftest files and plugins of this session."""
    args = [f"--rootdir={config.rootpath}", "-p", "no:terminal"]
    for plugin in _CACHE_WRITERS:
        args += ["-p", f"no:{plugin}"]
    args += [] if config.pluginmanager.is_blocked("capture") else ["-s"]
    args += [f"--import-mode={config.getoption('importmode')}", "-o", "addopts="]
    for warning in config.getoption("pythonwarnings") or []:
        args += ["-W", warning]
    # A worker imports fastcoll before it starts pytest. If fastcoll is installed, pytest warns of that.
    args += ["-W", "ignore:Module already imported so cannot be rewritten:pytest.PytestAssertRewriteWarning"]
    args += ["-c", str(config.inipath)] if config.inipath is not None else []
    args += ["--noconftest"] if config.getoption("noconftest") else []
    for plugin in config.getoption("plugins"):
        args += ["-p", plugin]
    for setting in config.getoption("override_ini") or []:
        args += ["-o", setting]
    hidden = {*_PARENT_OPTIONS.split()}
    sent = {}
    for name in vars(config.option).keys() - hidden:
        with contextlib.suppress(Exception):  # it cannot be pickled
            sent[name] = pickle.dumps(getattr(config.option, name))
    paths = config.args
    if not config.getoption("pyargs"):  # a test or a fixture may have changed the current directory
        paths = [str(config.invocation_params.dir / path) for path in paths]
    return Setup([*args, *paths], sent)
