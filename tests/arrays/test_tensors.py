"""PyTorch tensors: every dtype and layout over the same memory, or rejected with the cure."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import rows

import fastcoll as dist
from fastcoll.arrays import tensors
from fastcoll.arrays.arrays import import_array
from fastcoll.core.group import ProcessGroup
from fastcoll.errors import ArrayError

pytestmark = pytest.mark.filterwarnings("ignore:::torch", "ignore::UserWarning")


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason="pip install torch==2.13.0")


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def all_dtypes(torch: Any) -> list[Any]:
    """Return all of torch's dtypes."""
    return sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)


def raw(torch: Any, x: Any) -> list[int]:
    """Return the elements' bytes."""
    return x.reshape(-1).contiguous().view(torch.uint8).tolist()


def test_every_dtype_is_taken_over_the_same_memory_or_is_quantized(torch):
    taken = {}
    for dtype in all_dtypes(torch):
        x = torch.empty(6, dtype=dtype)
        if x.is_quantized:
            with pytest.raises(ArrayError, match=r"quantized.*x\.int_repr\(\).*x\.dequantize\(\)"):
                import_array(x, writable=False)
            continue
        taken[str(dtype)] = array = import_array(x, writable=True).array
        assert (address(array), array.shape) == (x.data_ptr(), (6,))
        assert array.itemsize == x.element_size()
        array.view(np.uint8)[...] = 7
        assert set(raw(torch, x)) == {7}
    assert len({array.dtype for array in taken.values()}) == len(taken), "each dtype is one of its own"
    for name in "bool int8 uint16 uint32 uint64 float16 float64 complex64 complex128".split():
        assert taken[f"torch.{name}"].dtype == np.dtype(name)
    for name in "bfloat16 float8_e4m3fn float8_e5m2 float8_e8m0fnu".split():
        assert taken[f"torch.{name}"].dtype == np.dtype(getattr(ml_dtypes, name))
    assert import_array(torch.arange(100_000), writable=False).array.sum() == 99_999 * 50_000, "it lives on"
    for shape in ((0,), (), (3, 0, 2), (1, 1)):
        array = import_array(torch.zeros(shape, dtype=torch.bfloat16), writable=True).array
        assert (array.shape, array.dtype.name) == (shape, "bfloat16")


def strided(torch: Any, dtype: Any) -> dict[str, Any]:
    x = torch.zeros(4, 6, dtype=dtype)
    return {
        "step": x[:, ::2],
        "transposed": x.t(),
        "column": x[1:, 3],
        "scalar": x[2, 2],
        "channels": x.view(1, 2, 2, 6).permute(0, 3, 1, 2),
    }


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float8_e4m3fn", "complex32", "bool"])
def test_strided_tensors_are_packed_and_written_back(torch, name):
    for view in strided(torch, getattr(torch, name)).values():
        imported = import_array(view, writable=True)
        assert imported.array.flags.c_contiguous
        assert imported.array.shape == tuple(view.shape)
        imported.array.reshape(-1).view(np.uint8)[...] = 1
        imported.finish()
        assert set(raw(torch, view)) == {1}


def test_tensors_that_require_grad_are_written_in_place(torch):
    class Image(torch.Tensor):
        """A subclass that holds its own data."""

    leaf, parameter = torch.zeros(3, requires_grad=True), torch.nn.Parameter(torch.zeros(2, 3))
    for x in (leaf, leaf * 2, parameter, parameter.t(), leaf.as_subclass(Image)):
        imported = import_array(x, writable=True)
        imported.array[...] = 5
        imported.finish()
        assert (x == 5).all()
        assert x.requires_grad


def test_the_tensors_storage_can_still_be_freed(torch):
    x = torch.zeros(4)
    part = x[1:]
    import_array(x, writable=True).array[...] = 1
    tensors.header_of(x)
    for left in (12, 0):  # bytes; the part has 12, of which the storage then has 8
        x.untyped_storage().resize_(left)
        for lost in (x, part):
            assert tensors.header_of(lost) is lost
            with pytest.raises(ArrayError, match="storage was resized"):
                import_array(lost, writable=True)


def test_conjugate_and_negative_views_are_read_and_written_as_they_look(torch):
    z = torch.tensor([1 + 2j, 3 - 1j])
    for view, result in (
        (z.conj(), [5 + 1j, 6 - 2j]),
        (z.conj().imag, [7.0, -8.0]),
        (z[:1].conj().imag, [9.0]),
    ):
        imported = import_array(view, writable=True)
        assert imported.array.tolist() == view.tolist()
        imported.array[...] = result
        imported.finish()
        assert view.tolist() == result
        assert import_array(view, writable=False).array.tolist() == result


def masked(torch: Any) -> Any:
    from torch.masked import masked_tensor

    return masked_tensor(torch.zeros(2), torch.tensor([True, False]))


def distributed(torch: Any) -> Any:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    spec = DTensorSpec(None, (), TensorMeta(torch.Size([2]), (1,), torch.float32))
    return DTensor.__new__(DTensor, torch.zeros(2), spec, requires_grad=False)


REFUSED = {
    "sparse": (lambda torch: torch.zeros(3).to_sparse(), r"layout torch\.sparse_coo; give x\.to_dense\(\)"),
    "csr": (lambda torch: torch.eye(3).to_sparse_csr(), r"layout torch\.sparse_csr; give x\.to_dense\(\)"),
    "mkldnn": (lambda torch: torch.zeros(2, 2).to_mkldnn(), r"layout torch\._mkldnn; give x\.to_dense\(\)"),
    "meta": (lambda torch: torch.zeros(3, device="meta"), r"device meta.*device='cpu'"),
    "nested": (lambda torch: torch.nested.nested_tensor([torch.zeros(2)]), r"nested; give its x\.unbind\(\)"),
    "masked": (masked, r"MaskedTensor .*; give the plain torch\.Tensors"),
    "distributed": (distributed, r"DTensor .*; give x\.to_local\(\), or x\.full_tensor\(\)"),
    "lazy": (
        lambda torch: torch.nn.LazyLinear(3).weight,
        "UninitializedParameter .*; it has no data; run the module once",
    ),
    "expanded": (lambda torch: torch.zeros(3).expand(2, 3), "elements may share memory"),
    "a dtype": (lambda torch: torch.float32, "must be an array, got dtype"),
    "a module": (lambda torch: torch.nn.Identity(), "must be an array, got Identity"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_tensors_without_elements_in_memory_are_refused_with_the_cure(torch, name):
    make, message = REFUSED[name]
    with pytest.raises(ArrayError, match=message):
        import_array(make(torch), writable=True)


def test_a_tensor_inside_vmap_is_refused(torch):
    with pytest.raises(ArrayError, match="no memory of its own"):
        torch.vmap(lambda x: import_array(x, writable=False))(torch.zeros(2, 3))


# ---- headers ----------------------------------------------------------------------------------------


@pytest.fixture
def known(torch: Any) -> None:
    """Headers are used only after a tensor has been imported."""
    import_array(torch.zeros(1), writable=True)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int64", "bool", "complex64"])
def test_a_header_describes_the_tensors_memory_and_is_found_again(torch, known, name):
    x = torch.ones(2, 3, dtype=getattr(torch, name), requires_grad=name == "float32")
    header = tensors.header_of(x)
    assert header is tensors.header_of(x)
    same = import_array(x, writable=True).array
    assert (address(header), header.shape, header.dtype) == (address(same), same.shape, same.dtype)
    assert header.dtype is same.dtype, "kernels know dtypes by their address"
    assert header.flags.carray
    y = np.zeros(2)
    one, two, three = tensors.headers_for((x, (y, x), 7))  # of the arguments of a call
    assert one is two[1] is header
    assert two[0] is y
    assert three == 7


def test_a_header_follows_changes_of_the_tensor(torch, known):
    x, other = torch.zeros(6), torch.ones(6)
    header = tensors.header_of(x)
    x.resize_(2, 3)
    assert tensors.header_of(x).shape == (2, 3)
    x.data = other
    assert address(tensors.header_of(x)) == other.data_ptr()
    x.set_(other.untyped_storage(), 1, (4,))
    assert address(tensors.header_of(x)) == other.data_ptr() + 4
    assert header.shape == (6,)
    assert tensors.header_of(other.view(torch.int32)).dtype == np.int32


def test_tensors_that_need_preparation_get_no_header(torch, known):
    z = torch.zeros(3, dtype=torch.complex64)
    for x in (torch.zeros(4, 4).t(), z.conj(), z[:1].conj().imag, torch.zeros(0), torch.zeros(2).to_sparse()):
        assert tensors.header_of(x) is x
    with torch.no_grad():
        nested = torch.nested.nested_tensor([torch.zeros(2)])
    assert tensors.header_of(nested) is nested


def test_the_memo_of_headers_is_bounded(torch, known, monkeypatch):
    monkeypatch.setattr(tensors, "_LARGEST_MEMO", 4)
    xs = [torch.zeros(3) for _ in range(9)]
    for x in xs:
        assert address(tensors.header_of(x)) == x.data_ptr()
    assert len(tensors._headers) <= 4


# ---- operations -------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_operations_on_tensors(rank: int, torch: Any, backend: str) -> None:
    """Each is called three times: the first two calls prepare, the last may use the short path."""
    group = dist.new_group(backend=backend)

    def change(name: str, function: Any) -> Any:
        return lambda *args, **options: function(
            *[rows.mapped(torch.from_numpy, x) for x in args], **options, group=group
        )

    for _ in range(3):
        rows.run(rank, 2, 5, change)
        x = torch.full((2, 2), rank + 1, dtype=torch.bfloat16)
        parts = [torch.zeros_like(x), np.zeros((2, 2), import_array(x, writable=False).array.dtype)]
        dist.all_gather(parts, x, group=group)
        assert (parts[0] == 1).all()
        assert (parts[1] == 2).all()
        dist.all_reduce(x, group=group)
        assert (x == 3).all()
        if rank == 0:
            dist.send(x + 6, 1, group=group)
        else:
            dist.recv(x, 0, group=group)
            assert (x == 9).all()
    x = torch.full((3,), float(rank + 1), requires_grad=True)
    dist.all_reduce(x, group=group)
    dist.all_reduce(x.t(), group=group, async_op=True).wait()
    assert x.tolist() == [6, 6, 6]
    flags = torch.tensor([rank == 1, False])
    dist.all_reduce(flags, dist.ReduceOp.MAX, group=group)
    assert flags.tolist() == [True, False]
    other = torch.zeros(4, dtype=torch.float8_e5m2 if rank == 0 else torch.float8_e4m3fn)
    with pytest.raises(dist.MismatchError):
        dist.broadcast(other, 0, group=group)
    dist.destroy_process_group(group)


@pytest.mark.ranks(1)
def test_the_short_path_takes_tensors(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def calls(x: Any, out: Any) -> None:
        dist.all_reduce(x)
        dist.broadcast(x, 0)
        dist.reduce(x, 0)
        dist.all_gather(list(out), x)
        dist.reduce_scatter_tensor(x, out)

    calls(torch.ones(3), torch.ones(1, 3))

    def adopts(*args: Any, **options: Any) -> None:
        pytest.fail("the general way was taken")

    monkeypatch.setattr(ProcessGroup, "import_array", adopts)
    calls(torch.ones(3, requires_grad=True), torch.ones(1, 3))
    with pytest.raises(pytest.fail.Exception, match="general way"):
        dist.all_reduce(torch.ones(3, 3).t())
