"""The driver's wrapper and the launch path, on a library that only records."""

from __future__ import annotations

import pytest
from kernels.cuda.fake_driver import Library

from fastcoll.errors import FastcollError, UnavailableError, UsageError
from fastcoll.kernels.cuda import driver
from fastcoll.kernels.cuda.driver import CudaDriver


def test_it_knows_its_devices() -> None:
    found = CudaDriver(Library())
    assert found.capabilities == [(8, 6), (9, 0)]
    assert found.capability() == (9, 0)
    assert found.multiprocessors == 132
    assert found.bus_id(1) == b"0000:1b:00.1"
    assert found.uuid(1) == b"\1\0\7" + b"\1" * 13, "also what comes after a zero"


def test_code_is_loaded_as_it_is_and_completely(monkeypatch: pytest.MonkeyPatch) -> None:
    library, finished = Library(), []
    library.define("cuFuncLoad", finished.append)
    monkeypatch.setattr(driver, "before_loading", [lambda: library.loaded.append(b"waited")])
    library.current = 1
    assert CudaDriver(library).load(b"cubin", "reduce") == 10
    assert library.loaded == [b"waited", b"cubin"]
    assert [function.value for function in finished] == [10]


@pytest.mark.parametrize("status", [201, 400])
def test_another_devices_context_is_misuse_with_the_cure(status: int) -> None:
    with pytest.raises(
        UsageError, match=rf"launching failed: CUDA_ERROR_{status} \({status}\): .*select_device"
    ):
        CudaDriver(Library()).check(status, "launching")


def test_other_errors_name_the_failed_action() -> None:
    with pytest.raises(
        FastcollError, match=r"loading a kernel failed: CUDA_ERROR_218 \(218\): what it means"
    ) as caught:
        CudaDriver(Library(cuLibraryLoadData=218)).load(b"?", "reduce")
    assert not isinstance(caught.value, UsageError)


def test_a_driver_that_does_not_start_is_unavailable() -> None:
    with pytest.raises(UnavailableError, match=r"does not start: CUDA_ERROR_100 \(100\)"):
        CudaDriver(Library(cuInit=100))


def test_a_driver_without_libraries_is_too_old() -> None:
    library = Library()
    del library.cuLibraryLoadData
    with pytest.raises(UnavailableError, match=r"no cuLibraryLoadData; .* CUDA 12 or later"):
        CudaDriver(library)


def test_no_devices_is_unavailable() -> None:
    library = Library()
    library.define("cuDeviceGetCount", lambda out: library.set(out, 0))
    with pytest.raises(UnavailableError, match="sees no device"):
        CudaDriver(library)
