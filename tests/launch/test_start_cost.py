"""What ranks and tools import, and how much a rank computes, until the first collective has returned."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

_IMPORTS_OF_NUMPY = 2.5
"""The promised processor time of a rank of one node whose kernels are on the disk, after the import of NumPy and
relative to it, as processors differ: 1.8 when this was written, 3 while a rank imported what it did not need."""
_STARTS = 10  # other processes can only make a start longer

RANK = """
import json, sys, time
began = time.process_time()
import numpy
known, imported = set(sys.modules), time.process_time()
import fastcoll as dist
dist.init_process_group()
dist.all_reduce(numpy.ones(1024, numpy.float32))
ended = time.process_time()
if dist.get_rank() == 0:
    print(json.dumps([imported - began, ended - imported, sorted(set(sys.modules) - known)]))
dist.destroy_process_group()
"""


def start(folder: Path) -> tuple[float, float, set[str]]:
    """Start two ranks; return rank 0's seconds for NumPy and after it, and the modules that it imported after it."""
    program = folder / "rank.py"
    program.write_text(RANK)
    words = [sys.executable, "-m", "fastcoll.launch", "-n", "2", "--no-prefix", str(program)]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    numpy, spent, modules = json.loads(done.stdout)
    return numpy, spent, set(modules)


def test_a_rank_of_one_node_imports_no_network_and_no_compiler(tmp_path: Path) -> None:
    start(tmp_path)  # compiles what is not on the disk
    *_, modules = start(tmp_path)
    assert "fastcoll.shm.backend" in modules
    for unneeded in ("numba", "numpy.ma", "multiprocessing", "subprocess", "tempfile", "encodings.idna"):
        assert unneeded not in modules
    assert not {name for name in modules if name.startswith(("fastcoll.net", "fastcoll.hybrid.backend"))}


@pytest.mark.timed
def test_a_rank_starts_within_the_promised_time(tmp_path: Path) -> None:
    start(tmp_path)
    starts = [start(tmp_path) for _ in range(_STARTS)]
    assert min(spent for _, spent, _ in starts) < _IMPORTS_OF_NUMPY * min(numpy for numpy, *_ in starts)


LATE = {
    "import fastcoll.bench.__main__": "importlib.metadata email multiprocessing fastcoll.launch fastcoll.shm.backend",
    "from fastcoll.arrays.arrays import import_array as of; of(memoryview(b'ab'), writable=False)": "numpy.ma",
}


@pytest.mark.parametrize("program", LATE)
def test_what_is_rarely_needed_is_imported_late(program: str) -> None:
    words = [sys.executable, "-c", f"import sys; {program}; print(*sys.modules)"]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    assert not {*LATE[program].split()} & {*done.stdout.split()}
