"""Tensors travel with their memory beside the pickle, and arrive as they were."""

import pytest
import torch
from torch.nn import Parameter

from fastcoll.rpc import wire
from fastcoll.rpc.agent import WorkerInfo

TO = WorkerInfo("w0", 0)
x = torch.arange(12.0)


@pytest.mark.parametrize(
    "value",
    [
        *[
            torch.tensor([3, 0, 1]).to(dtype)
            for dtype in (torch.bfloat16, torch.bool, torch.int8, torch.float64)
        ],
        torch.tensor(3.0),
        torch.empty(0, 3),
        x.view(3, 4).t(),
        x[::5],
        torch.complex(x, x).conj(),
        x.view(3, 4).to_sparse(),
        x.clone().requires_grad_(),
        (x.clone().requires_grad_() * 2),
        Parameter(x),
        Parameter(x, requires_grad=False),
        torch.nn.Linear(2, 2),
    ],
    ids=str,
)
def test_a_tensor_arrives_as_it_was(value):
    pickled, buffers = wire.dumps({"it": [value]}, TO)
    came = wire.Received(wire.MessageType.TELL, 1, 0, b"", pickled, [bytearray(each) for each in buffers])
    with wire.receiving(TO):
        (found,) = wire.loads(came)["it"]
    assert type(found) is type(value)
    if isinstance(value, torch.nn.Module):
        assert len(buffers) == 2
        found, value = found.weight, value.weight
    assert torch.equal(found.to_dense(), value.to_dense())
    assert (found.dtype, found.requires_grad, found.is_leaf) == (value.dtype, value.requires_grad, True)
    if found.layout == torch.strided and not found.requires_grad:
        found.zero_()  # it may be written


def test_its_memory_is_beside():
    value = torch.zeros(1 << 20)
    pickled, buffers = wire.dumps(value, TO)
    assert len(pickled) < 500
    assert [each.nbytes for each in buffers] == [4 << 20]
    buffers[0][:4] = torch.ones(1).numpy().tobytes()
    assert value[0] == 1  # the same memory
