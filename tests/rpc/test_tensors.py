"""Tensors arrive unchanged: values, strides, and the memory that a message's tensors share."""

import numpy as np
import pytest
import torch
from torch.nn import Parameter

from fastcoll.rpc import pickling, wire
from fastcoll.rpc.worker_info import WorkerInfo

TO = WorkerInfo("w0", 0)
x = torch.arange(12.0)


def there(value):
    """Return what the receiver gets for a value."""
    pickled, buffers = pickling.dumps({"it": value}, TO)
    came = wire.RpcMessage(wire.MessageType.NOTIFY, 1, 0, pickled, [bytearray(each) for each in buffers])
    with pickling.receiving(TO):
        return pickling.loads(came)["it"]


@pytest.mark.parametrize(
    "value",
    [
        *(torch.tensor([3, 0, 1], dtype=dtype) for dtype in (torch.bool, torch.int8, torch.uint16)),
        *(x[:3].to(dtype) for dtype in (torch.bfloat16, torch.float64, torch.float8_e5m2)),
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
        torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.linspace(0, 1, 6078).as_strided((60, 60), (3, 100)),
        x[:3, None].expand(3, 4),
    ],
    ids=str,
)
def test_a_tensor_arrives_as_it_was(value):
    (found,) = there([value])
    assert type(found) is type(value)
    if isinstance(value, torch.nn.Module):
        found, value = found.weight, value.weight
    if value.layout == torch.strided and not value.is_conj():
        assert found.stride() == value.stride()
    assert torch.equal(*(each.to_dense().to(torch.complex128) for each in (found, value)))
    assert (found.dtype, found.requires_grad, found.is_leaf) == (value.dtype, value.requires_grad, True)
    if found.layout == torch.strided and not found.requires_grad:
        found.zero_()  # it is writable


def test_the_memory_of_a_tensor_is_sent_beside_the_pickle():
    value = torch.zeros(1 << 20)
    pickled, buffers = pickling.dumps(value, TO)
    assert len(pickled) < 500
    assert [each.nbytes for each in buffers] == [4 << 20]
    buffers[0][:4] = torch.ones(1).numpy().tobytes()
    assert value[0] == 1  # the same memory


@pytest.mark.parametrize("count", [10, 5000])
def test_tensors_of_a_message_that_share_memory_share_it_at_the_receiver(count):
    value = torch.arange(float(count))
    whole, rest, integers, other = there((value, value[1:], value.view(torch.int32), value.clone()))
    rest[0] = 7
    assert whole[1] == 7
    assert integers[1] == torch.tensor(7.0).view(torch.int32)
    assert other[1] == 1
    assert value[1] == 1


def test_storages_of_different_sizes_at_one_address_arrive_as_they_were():
    values = np.arange(3000.0)
    sent = [torch.from_numpy(each) for each in (values[:2], values, values[:2000])]
    assert all(map(torch.equal, there(sent), sent))


def test_a_small_part_of_a_storage_is_sent_alone():
    row = torch.rand(1000, 100)[3]
    pickled, buffers = pickling.dumps(row, TO)
    assert len(pickled) + sum(each.nbytes for each in buffers) < 1000
    assert torch.equal(there(row), row)
