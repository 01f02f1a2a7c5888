"""What `import fastcoll` may do, and which imports are allowed in which file."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import fastcoll
from fastcoll import supported
from fastcoll.compiler import cache

PACKAGE = Path(__file__).parents[1] / "fastcoll"

# Rooms and files from the ground up; each may import from lower lines and from itself.
LAYERS = (
    ("_version", "errors", "core/operations"),
    ("failpoints",),
    ("config",),
    ("supported", "system", "arrays"),
    ("record",),
    ("core",),
    ("compiler",),
    ("kernels",),
    ("metrics",),
    ("store",),
    ("p2p", "rendezvous"),
    ("shm", "net", "net/tcp", "net/mpi", "gpu"),
    ("hybrid",),
    ("job",),
    ("api",),
    ("symmetric", "callers"),
    ("__init__",),
    ("launch",),
    ("elastic", "rpc"),
    ("pages",),
    ("testing", "torch", "jax", "bench", "ray"),
    ("torchft",),
    ("warmup", "traced", "shipping"),
    ("tools",),
    ("profiling",),
    ("__main__",),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}

# A module that only some rooms or files may import.
KEPT = {
    # The last two use the cloudpickle in it.
    "numba": ("kernels", "compiler", "callers", "launch", "testing"),
    "llvmlite": ("kernels", "compiler", "callers"),
    "posix_ipc": ("shm",),
    "socket": ("system", "metrics", "store", "rendezvous", "net/tcp", "rpc"),
    "prometheus_client": ("metrics",),
    "opentelemetry": ("rpc",),
    # In testing: from pytest to its own workers.
    "pickle": ("api/objects.py", "rpc/pickling.py", "rpc/tensor_buffers.py", "testing"),
    "numba.cloudpickle": ("launch/run.py",),  # from the caller and its own children
    "cupy": ("gpu",),
}

FILES = sorted(PACKAGE.rglob("*.py"))


def room_of(file: Path) -> str:
    return room(file.relative_to(PACKAGE).with_suffix("").parts)


def room(parts: Sequence[str]) -> str:
    """Return the room of a module with these names below fastcoll; some modules have their own line in LAYERS."""
    return next((name for name in ("/".join(parts[:2]), parts[0]) if name in LEVEL), parts[0])


def imports(file: Path) -> Iterator[tuple[str, int]]:
    """Yield the absolute names of all imports in a file, with the line."""
    package = ["fastcoll", *file.relative_to(PACKAGE).parent.parts]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = [*base, *(node.module or "").split(".")] if node.module else base
            for alias in node.names:
                yield ".".join([*module, alias.name]), node.lineno


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_point_one_way_and_some_modules_are_imported_in_one_room_only(file: Path) -> None:
    here = room_of(file)
    is_root = file.name == "__init__.py" and file.parent == PACKAGE  # it has the public names of all rooms
    assert here in LEVEL or is_root, f"{here} is new; give it a place in LAYERS"
    for name, line in imports(file):
        parts = name.split(".")
        if parts[0] == "fastcoll" and len(parts) > 1 and not is_root:
            there = found if (found := room(parts[1:])) in LEVEL else "__init__"
            assert there == here or LEVEL[there] < LEVEL[here], f"{file}:{line}: {here} imports {name}"
        for kept in (parts[0], name):
            places = KEPT.get(kept, (here,))
            assert {here, str(file.relative_to(PACKAGE))} & set(places), (
                f"{file}:{line}: {name} is for {places}"
            )


def test_no_files_import_each_other_not_even_inside_functions() -> None:
    """Nor for types only."""
    modules = {
        ".".join(["fastcoll", *file.relative_to(PACKAGE).with_suffix("").parts]): file for file in FILES
    }
    modules = {name.removesuffix(".__init__"): file for name, file in modules.items()}
    needs: dict[str, set[str]] = {}
    for module, file in modules.items():
        names = {name for name, _ in imports(file)}
        found = {next((m for m in (name, name.rpartition(".")[0]) if m in modules), "") for name in names}
        needs[module] = found - {module, "fastcoll", ""}
    while leaves := [module for module, needed in needs.items() if not needed & needs.keys()]:
        for module in leaves:
            del needs[module]
    assert not needs


def test_the_state_of_the_sources_leaves_out_only_rooms_that_no_kernel_can_import() -> None:
    marks = tuple(f"fastcoll.compiler.jit.{mark}" for mark in ("entry", "kernel", "inlined", "c_function"))
    compiled = {room_of(file) for file in FILES for name, _ in imports(file) if name in marks}
    assert {"shm", "net/tcp", "net/mpi"} <= compiled
    for room in cache._OTHER_ROOMS:
        assert room not in compiled
        assert all(LEVEL[room] >= LEVEL[there] for there in compiled), room


def run(code: str, *arguments: str, **environment: str) -> str:
    """Run a program and return its output."""
    command, env = [sys.executable, "-c", code, *arguments], {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=env).stdout


REPORT = """
import json, os, sys, threading
import numpy, multiprocessing, uuid, socket, logging

read = []
class Watched(dict):
    def __getitem__(self, key):
        read.append(key)
        return dict.__getitem__(self, key)
    def get(self, key, default=None):
        read.append(key)
        return dict.get(self, key, default)
    def __contains__(self, key):
        read.append(key)
        return dict.__contains__(self, key)
os.environ = Watched(os.environ)

events = []
STARTS = ("socket.connect", "socket.bind", "socket.__new__", "subprocess", "os.fork", "os.posix_spawn", "os.exec")
sys.addaudithook(lambda name, args: events.append(name) if name.startswith(STARTS) else None)
before = sorted(os.listdir("/proc/self/fd")), threading.active_count()
import fastcoll
after = sorted(os.listdir("/proc/self/fd")), threading.active_count()
print(json.dumps({
    "modules": sorted(sys.modules), "read": [*read], "events": events, "same": before == after,
    "dir": dir(fastcoll),
    "missing": [name for name in fastcoll.__all__ if not hasattr(fastcoll, name)],
}))
"""


def test_importing_only_defines_the_public_names() -> None:
    """They include spawn and TCPStore, which are imported at first use."""
    report = json.loads(run(REPORT))
    assert report["events"] == [], "it connects, forks or starts something"
    assert report["same"], "importing fastcoll changed the open files or the threads"
    assert report["read"] == [], "it reads the environment"
    assert report["missing"] == []
    assert report["dir"] == sorted(fastcoll.__all__)
    assert len(fastcoll.__all__) == len(set(fastcoll.__all__))
    with pytest.raises(AttributeError, match="no attribute 'all_reduced'"):
        fastcoll.all_reduced  # noqa: B018


def test_importing_does_not_import_heavy_modules() -> None:
    heavy = {
        "numba", "llvmlite", "posix_ipc", "cupy", "torch", "matplotlib", "rich", "psutil", "sklearn", "ml_dtypes",
        "pytest", "asyncio", "multiprocessing", "fastcoll.launch", "fastcoll.kernels", "fastcoll.shm", "fastcoll.bench",
        "fastcoll.compiler",
    }  # fmt: skip
    # No sockets, and only the used part of the standard library; NumPy imports some modules itself, by version.
    late = {
        "socket", "_socket", "selectors", "ipaddress", "urllib.parse", "hmac", "tempfile", "random", "bz2", "lzma",
        "concurrent.futures.thread", "subprocess",
    }  # fmt: skip
    plain, ours = (
        set(run(f"import sys, {name}; print(*sys.modules)").split()) for name in ("numpy", "fastcoll")
    )
    assert not (heavy | late - plain) & ours


# Each case replaces something that is not here; the last word is the imported module.
REFUSED = {
    "sys.platform 'darwin' fastcoll": "fastcoll does not run here: it needs Linux, and this is darwin",
    "sys.implementation.name 'pypy' fastcoll": "it needs CPython, and this is pypy",
    "sys.abiflags 't' fastcoll": "this is a free-threaded build of Python",
    "sys.byteorder 'big' fastcoll": "this machine is big-endian",
    "sys.maxsize 2147483647 fastcoll": "this is a 32-bit Python",
    "os.path.lexists str.isspace fastcoll": "there is no /proc/self/stat; mount all of /proc",
    "os.uname riscv fastcoll": "never tested on this processor, riscv64",
    "sys.version '3.9.18' fastcoll": "fastcoll needs Python 3.10 or later, and this is 3.9.18",
    "numpy.__version__ '1.25.2' fastcoll": "fastcoll needs NumPy 1.26 or later, and this is 1.25.2",
    "numba.__version__ '0.59.1' fastcoll.compiler.compiling": "fastcoll needs Numba 0.60 or later, and this is 0.59.1",
}
ELSEWHERE = """
import importlib, json, os, sys, types, unittest.mock
import numba
import fastcoll  # and what it needs, before the platform is another one

arm, riscv = (lambda name=name: types.SimpleNamespace(machine=name) for name in ("aarch64", "riscv64"))
said = []
for case in json.loads(sys.argv[1]):
    for name in [name for name in sys.modules if name.partition(".")[0] == "fastcoll"]:
        del sys.modules[name]
    attribute, value, module = case.split()
    with unittest.mock.patch(attribute, eval(value)):
        try:
            importlib.import_module(module)
            said.append("imported")
        except ImportError as error:
            said.append(str(error))
print(json.dumps(said))
"""


def elsewhere(*cases: str, **environment: str) -> list[str]:
    """Return the error of the import in each case."""
    said: list[str] = json.loads(run(ELSEWHERE, json.dumps(cases), **environment))
    return said


def test_unsupported_platforms_are_refused_by_name() -> None:
    for expected, said in zip(REFUSED.values(), elsewhere(*REFUSED), strict=True):
        assert expected in said
    assert elsewhere("os.uname arm fastcoll") == ["imported"]
    assert elsewhere("os.uname riscv fastcoll", FASTCOLL_UNTESTED_PLATFORM="1") == ["imported"]


def test_a_subinterpreter_is_refused() -> None:
    code = """if True:
        try:  # Python 3.13 and later
            import _interpreters as interpreters
            new, run = interpreters.create("legacy"), interpreters.exec
        except ImportError:
            import _xxsubinterpreters as interpreters
            new, run = interpreters.create(isolated=False), interpreters.run_string
        run(new, "try: import fastcoll\\nexcept ImportError as error: print(error, flush=True)")
    """
    assert "does not run here: this is a subinterpreter" in run(code)


def test_the_oldest_versions_are_those_of_the_package() -> None:
    text = (PACKAGE.parent / "pyproject.toml").read_text()
    for package, (major, minor) in supported.OLDEST.items():
        name = "requires-python = " if package == "Python" else package.lower()
        assert re.search(rf'{name}"?>={major}\.{minor}"', text), package


def test_some_rooms_are_imported_at_first_use() -> None:
    """They include JAX; tests/with_jax tests it installed."""
    program = """
import sys, fastcoll as dist
rooms = ["fastcoll.elastic", "fastcoll.rpc", "fastcoll.jax"]
assert not {*rooms} & {*sys.modules}
sys.modules["fastcoll.jax"] = "fastcoll.jax"
assert [dist.elastic.__name__, dist.rpc.__name__, dist.jax] == rooms
dist.elastic.run, dist.rpc.rpc_sync
"""
    run(program)
