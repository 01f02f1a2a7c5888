"""The import of arrays: which share memory, which are packed and copied back, which are rejected with which cure."""

from __future__ import annotations

import array
import mmap
from typing import ClassVar

import ml_dtypes
import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

from fastcoll.arrays.arrays import import_array, import_list
from fastcoll.errors import ArrayError, UsageError

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
RECORD = np.dtype([("value", "f4"), ("index", "i8"), ("tag", "S3")])
DTYPES = [*"?bhilqBHILQefdgFDG", BFLOAT16, RECORD, "M8[ns]", "m8[s]", "S7", "U3", "V5", ">f4", ml_dtypes.int4]


class Interface:
    """Supports the array interface only."""

    def __init__(self, x: np.ndarray) -> None:
        self.__array_interface__ = x.__array_interface__
        self.owner = x


class Dlpack:
    """Supports DLPack only."""

    def __init__(self, x: np.ndarray, device: tuple[int, int] | None = None) -> None:
        self.x = x
        self.device = device or x.__dlpack_device__()

    def __dlpack__(self, **kwargs):
        return self.x.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.device


class CudaInterface:
    """Like the device arrays of CuPy and Numba."""

    __cuda_array_interface__: dict[str, object] = {}  # noqa: RUF012


WRITES_DLPACK = np.lib.NumpyVersion(np.__version__) >= "2.1.0"
WRAPPERS = [Interface, memoryview, *([Dlpack] if WRITES_DLPACK else [])]


def refused(match: str, kind: type[Exception] = ArrayError):
    return pytest.raises(kind, match=match)


# ---- ndarrays ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 0, 2), (2, 3, 4), (1, 5, 1)])
@pytest.mark.parametrize("writable", [False, True])
def test_a_contiguous_array_is_itself(shape, writable):
    x = np.zeros(shape)
    assert import_array(x, writable=writable).array is x


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_fixed_size_dtype_is_taken_as_it_is(dtype):
    x = np.zeros((2, 6), dtype)
    assert import_array(x, writable=True).array is x
    packed = import_array(x[:, ::2], writable=True)
    assert packed.array.dtype == x.dtype
    packed.finish()


def strided_views():
    x = np.arange(120.0).reshape(4, 5, 6)
    yield "step", x[:, ::2]
    yield "reversed", x[::-1]
    yield "column", x[:, 0, 0]
    yield "fortran", np.asfortranarray(x)
    yield "transposed", x.T
    yield "field", np.zeros((3, 4), RECORD)["index"]
    yield "interleaved", as_strided(np.arange(8.0), (2, 2), (24, 16))
    yield "one row", as_strided(np.arange(8.0), (1, 3), (0, 16))


VIEWS = [pytest.param(view, id=name) for name, view in strided_views()]


@pytest.mark.parametrize("view", VIEWS)
def test_a_strided_array_is_packed_and_written_back_if_it_is_an_output(view):
    imported = import_array(view, writable=False)
    assert imported.array.flags.c_contiguous
    assert (imported.array == view).all()
    imported.array[...] = -1
    imported.finish()
    assert not (view == -1).all(), "an input is not written to"
    imported = import_array(view, writable=True)
    assert imported.array.flags.c_contiguous
    assert imported.array.shape == view.shape
    result = -1 - np.arange(view.size).reshape(view.shape)
    imported.array[...] = result
    assert not (view == result).all(), "nothing is written before finish"
    imported.finish()
    imported.finish()
    assert (view == result).all()


def test_memory_between_a_strided_outputs_elements_is_unchanged():
    x = np.arange(10)
    imported = import_array(x[::2], writable=True)
    imported.array[...] = -1
    x[1] = 77  # another writer, meanwhile
    imported.finish()
    assert x.tolist() == [-1, 77, -1, 3, -1, 5, -1, 7, -1, 9]


def test_a_read_only_array_can_be_sent_but_not_written_to():
    x = np.arange(3.0)
    x.flags.writeable = False
    assert import_array(x, writable=False).array is x
    with refused(r"output is a read-only float64 array of shape \(3,\).*writable copy"):
        import_array(x, writable=True, what="output")
    scalar = import_array(np.float32(1.5), writable=False).array
    assert (scalar.dtype, scalar.shape, scalar[()]) == (np.float32, (), 1.5)
    with refused(r"NumPy scalar \(float32\).*numpy\.array\(x\)"):
        import_array(np.float32(1.5), writable=True)


@pytest.mark.parametrize(
    ("shape", "strides"), [((4,), (0,)), ((3, 4), (0, 8)), ((3, 4), (8, 8)), ((5,), (4,)), ((2, 3), (8, -8))]
)
def test_an_output_whose_elements_share_memory_is_refused(shape, strides):
    x = as_strided(np.arange(40.0)[20:], shape, strides)
    with refused(r"tensor is a float64 array of shape .* strides .* share memory"):
        import_array(x, writable=True)
    assert (import_array(x, writable=False).array == x).all()


def test_subclasses_are_taken_as_plain_arrays(tmp_path):
    with pytest.warns(PendingDeprecationWarning):
        matrix = np.matrix([[1.0, 2.0]])
    mapped = np.memmap(tmp_path / "data", np.float32, "w+", shape=(4,))
    for x in (matrix, mapped, np.zeros(3, RECORD).view(np.recarray)):
        imported = import_array(x, writable=True).array
        assert type(imported) is np.ndarray
        assert np.shares_memory(imported, x)


# ---- other libraries' arrays ------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("step", [1, 2])
def test_other_arrays_share_their_memory_or_are_packed_and_written_back(wrap, step):
    x = np.zeros((4, 6))
    imported = import_array(wrap(x[:, ::step]), writable=True)
    assert imported.array.shape == (4, 6 // step)
    assert np.shares_memory(imported.array, x) == (step == 1)
    imported.array[...] = 9
    imported.finish()
    assert (x[:, ::step] == 9).all()
    assert x.sum() == 9 * 24 // step
    imported = import_array(wrap(np.arange(1000)), writable=False)
    assert imported.array.sum() == 499500, "it lives as long as it is used"
    x.flags.writeable = False
    assert import_array(wrap(x), writable=False).array.shape == (4, 6)
    with refused("read-only"):
        import_array(wrap(x), writable=True)


def test_buffers_of_the_standard_library():
    numbers = array.array("d", [1, 2])
    import_array(numbers, writable=True).array[...] = 5
    assert numbers.tolist() == [5, 5]
    data = bytearray(b"abc")
    import_array(data, writable=True).array[0] = ord("x")
    assert data == b"xbc"
    assert import_array(b"abc", writable=False).array.tolist() == list(b"abc")
    with refused("read-only"):
        import_array(b"abc", writable=True)


@pytest.mark.parametrize("x", [CudaInterface(), Dlpack(np.zeros(2), device=(2, 0))], ids=["cuda", "dlpack"])
def test_arrays_on_a_gpu_are_refused_unless_in_pinned_host_memory(x):
    with refused("output is on a GPU .*, and this call takes host arrays: copy it"):
        import_array(x, writable=False, what="output")
    assert import_array(Dlpack(np.arange(3), device=(3, 0)), writable=False).array.tolist() == [0, 1, 2]


def test_dlpack_before_its_version_1_is_read_in_place():
    """Its interface does not report whether writing is allowed, so NumPy makes it read-only."""

    class Old(Dlpack):
        def __dlpack__(self, stream=None):
            return self.x.__dlpack__()

    x = np.arange(3.0)
    array = import_array(Old(x), writable=False).array
    assert np.shares_memory(array, x)
    assert array.tolist() == [0, 1, 2]
    with refused("Old, which is read-only through DLPack"):
        import_array(Old(x), writable=True)


def test_objects_whose_memory_is_gone_or_described_wrong_are_refused_with_the_reason():
    class Wrong:
        __array_interface__: ClassVar = {
            "version": 3,
            "shape": (1,),
            "typestr": "nonsense",
            "data": (0, False),
        }

    class Fails:
        def __dlpack_device__(self):
            raise RuntimeError("the device is lost")

    closed = mmap.mmap(-1, 100)
    closed.close()
    released = memoryview(b"abc")
    released.release()
    for x, reason in (
        (closed, "closed"),
        (released, "released"),
        (Wrong(), "nonsense"),
        (Fails(), "is lost"),
    ):
        with refused(f"{type(x).__name__} that NumPy cannot view: .*{reason}"):
            import_array(x, writable=False)


def test_arrays_that_dlpack_cannot_export_are_refused_with_its_message():
    class Refuses(Dlpack):
        def __dlpack__(self, **kwargs):
            raise BufferError("not exportable today")

    with refused("Refuses that NumPy cannot view: not exportable today"):
        import_array(Refuses(np.zeros(1)), writable=False)


class WithArrayMethod:
    def __array__(self, dtype=None, copy=None):
        return np.zeros(2)


MAKE_ONE = r"make one with numpy\.array"
NO_ARRAYS = [
    (None, "must be an array, got NoneType; every rank gives one"), ([1.0], f"got list; {MAKE_ONE}"),
    ((1, 2), f"got tuple; {MAKE_ONE}"), (3, f"got int; {MAKE_ONE}"), (2.5, f"got float; {MAKE_ONE}"),
    (True, f"got bool; {MAKE_ONE}"), (WithArrayMethod(), f"got WithArrayMethod; {MAKE_ONE}"),
    ("text", "got str; .*object collectives"), ({1: 2}, "got dict; .*object collectives"),
    (np.ma.masked_array([1, 2], [0, 1]), r"masked array.*x\.filled\(value\) or x\.data"),
    (np.zeros(2, "O"), "Python objects.*object collectives"),
    (np.zeros(2, [("a", "i4"), ("b", "O")]), "Python objects.*object collectives"),
]  # fmt: skip


@pytest.mark.parametrize(("x", "cure"), NO_ARRAYS)
@pytest.mark.parametrize("writable", [False, True])
def test_objects_that_are_no_arrays_are_refused_with_the_cure(x, cure, writable):
    with refused(f"tensor .*{cure}"):
        import_array(x, writable=writable)


# ---- lists ------------------------------------------------------------------------------------------


def test_a_list_has_one_array_a_rank():
    xs = [np.zeros(3), np.zeros((2, 2), "i4"), np.zeros(0)]
    for given, imported in zip(xs, import_list(tuple(xs), 3, writable=True, what="outputs"), strict=True):
        assert imported.array is given
    for wrong, why, kind in (
        ([np.zeros(1)] * 2, "input_list must have 3 arrays, one a rank, got 2", UsageError),
        *[(x, "must be a list of 3 arrays, got", UsageError) for x in (None, 5, np.eye(3), "abc", {1: 2})],
        ([xs[0], None, xs[0]], r"input_list\[1\] must be an array, got NoneType", ArrayError),
    ):
        with refused(why, kind):
            import_list(wrong, 3, writable=False, what="input_list")
