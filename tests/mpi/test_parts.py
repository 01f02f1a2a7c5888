"""The parts of the MPI backend that need no MPI."""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.metadata
import importlib.util
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
from net.meshes import default_settings

import fastcoll
from fastcoll.net.mpi import library as mpi_library
from fastcoll.net.mpi.execution import LARGEST, SEGMENT, are_near, messages_of, segments
from fastcoll.net.mpi.library import why_unavailable
from fastcoll.net.mpi.membership import retire_comm, retired


@pytest.mark.parametrize("itemsize", [1, 2, 8, 16, 24, SEGMENT + 8])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("items", [1, 2, 7, 1000])
def test_segments_cover_an_array_once_and_cut_no_element(itemsize: int, ranks: int, items: int) -> None:
    found = [
        (start + first, nbytes)
        for start, slices in segments(items * itemsize, ranks, itemsize)
        for first, nbytes in slices
    ]
    assert all(first % itemsize == nbytes % itemsize == 0 for first, nbytes in found)
    ends = [0, *itertools.accumulate(nbytes for _, nbytes in found)]
    assert [first for first, _ in found] == ends[:-1]
    assert ends[-1] == items * itemsize


def test_long_arrays_are_divided_into_segments_and_messages() -> None:
    starts = [start for start, _ in segments(3 * SEGMENT + 8, 2, 8)]
    assert starts == [0, SEGMENT, 2 * SEGMENT, 3 * SEGMENT]
    found = messages_of((1000, 2 * LARGEST + 5))  # each less than 2**31 bytes
    assert found == [(1000, LARGEST), (1000 + LARGEST, LARGEST), (1000 + 2 * LARGEST, 5)]
    assert messages_of((1000, 0)) == []


def test_blocks_are_near_within_31_bits() -> None:
    assert are_near([])
    assert are_near([(0, 0), (1 << 40, 8)])  # an empty block has no address
    assert are_near([(1 << 40, 8), ((1 << 40) + (1 << 31) - 9, 8)])
    assert not are_near([(1 << 40, 8), ((1 << 40) + (1 << 31) - 8, 8)])


def test_a_signal_handler_may_leave_a_group_while_another_one_is_being_left() -> None:
    library: Any = SimpleNamespace(lock=nullcontext())
    freed = []

    def group(name: str, during: Callable[[], None]) -> tuple[Any, Any]:
        comm = SimpleNamespace(Iprobe=lambda: False, Free=lambda: freed.append(name))
        return comm, SimpleNamespace(is_over=lambda: during() or True)

    def handler() -> None:
        retire_comm(library, *group("the handler's", lambda: None), failed=False)

    leaves = Thread(target=lambda: retire_comm(library, *group("own", handler), failed=False), daemon=True)
    leaves.start()
    leaves.join(60)
    assert (freed, [*retired]) == (["the handler's", "own"], [])


@pytest.fixture
def mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the import system find mpi4py."""
    spec = importlib.machinery.ModuleSpec("mpi4py.MPI", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "4.1.2")


@pytest.mark.usefixtures("mpi4py")
@pytest.mark.parametrize(
    ("environ", "works"),
    [
        ({}, True),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, True),
        ({"PMIX_RANK": "1", "SLURM_PROCID": "1"}, True),
        ({"OMPI_COMM_WORLD_RANK": "0", "RANK": "0", "WORLD_SIZE": "2"}, True),
        ({"RANK": "0", "WORLD_SIZE": "2"}, False),
        ({"SLURM_PROCID": "0"}, False),
        ({"RANK": "", "WORLD_SIZE": ""}, True),
        ({"PMI_RANK": "", "RANK": "0", "WORLD_SIZE": "2"}, False),
    ],
)
def test_available_means_started_by_mpi_or_without_a_launcher(environ: dict[str, str], works: bool) -> None:
    why = why_unavailable(environ)
    assert (why is None) == works
    assert why is None or "mpiexec" in why


@pytest.mark.usefixtures("mpi4py")
def test_an_old_mpi4py_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "3.1.6")
    assert "mpi4py is 3.1.6, but 4 or newer is needed" in str(why_unavailable({}))


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        (ModuleNotFoundError("No module named 'mpi4py'"), "mpi4py is not installed"),
        (RuntimeError("cannot load MPI library"), "finds no MPI library .cannot load MPI library"),
        (None, "has no module"),
    ],
)
def test_a_missing_requirement_is_named_with_its_cure(
    problem: Exception | None, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(name: str) -> None:
        if problem is not None:
            raise problem

    monkeypatch.setattr(mpi_library.importlib.util, "find_spec", find)
    assert not fastcoll.is_mpi_available()
    with pytest.raises(fastcoll.UnavailableError, match=rf"{text}.*pip install '\.\[mpi\]'"):
        fastcoll.init_process_group("mpi")
    assert not fastcoll.is_initialized()


@pytest.mark.usefixtures("mpi4py")
def test_mpi_between_nodes_needs_mpis_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    one = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    with default_settings(monkeypatch):
        for name, value in {"FASTCOLL_BETWEEN_NODES": "mpi", **one}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(fastcoll.UnavailableError, match="mpiexec"):
            fastcoll.init_process_group()
        assert not fastcoll.is_initialized()
        monkeypatch.undo()


def answers(code: int, aware: int) -> Callable[..., int]:
    """Return a library's function that sets a flag for CUDA, the kind 0."""

    def query(kind: int, flag: Any) -> int:
        if kind == 0:
            ctypes.cast(flag, ctypes.POINTER(ctypes.c_int))[0] = aware
        return code

    return query


@pytest.mark.parametrize(
    ("functions", "aware"),
    [
        ({}, False),
        ({"MPIX_Query_cuda_support": lambda: 1}, True),
        ({"MPIX_Query_cuda_support": lambda: 0}, False),
        ({"MPIX_GPU_query_support": answers(0, 1)}, True),
        ({"MPIX_GPU_query_support": answers(0, 0)}, False),
        ({"MPIX_GPU_query_support": answers(15, 1)}, False),  # an MPI error
        ({"MPIX_GPU_query_support": answers(0, 0), "MPIX_Query_cuda_support": lambda: 0}, False),
    ],
)
def test_a_library_is_cuda_aware_if_it_declares_so(functions: dict[str, Any], aware: bool) -> None:
    assert mpi_library.is_cuda_aware(SimpleNamespace(**functions)) is aware
