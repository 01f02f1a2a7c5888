"""JAX arrays: read in place, never written, and replaced by new ones."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import fastcoll as dist
from fastcoll.arrays.arrays import import_array
from fastcoll.errors import ArrayError

# The four bits of the last are unpacked into bytes.
DTYPES = "bool int8 uint16 int32 float16 bfloat16 float32 float8_e4m3fn complex64 int4".split()


# In a process of its own: JAX warns of every fork of a process that has imported it, and tests of other files fork.
ALONE = pytest.mark.ranks(1)


@pytest.fixture
def jax() -> Any:
    return pytest.importorskip("jax", reason="pip install jax")


@ALONE
@pytest.mark.parametrize("name", DTYPES[:-1])
def test_an_input_is_read_where_it_is(jax, name):
    x = jax.numpy.ones((3, 4), name)
    array = import_array(x, writable=False).array
    assert array.__array_interface__["data"][0] == x.unsafe_buffer_pointer()
    assert (array.dtype.name, array.shape) == (name, (3, 4))


@ALONE
@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_an_array_that_the_call_writes_is_copied_and_replaced(jax, name, shape):
    x = jax.numpy.zeros(shape, name)
    imported = import_array(x, writable=True, functional=True)
    imported.array[...] = 1
    new = imported.finish()
    assert isinstance(new, jax.Array)
    assert (new.dtype, new.shape, new.sharding) == (x.dtype, shape, x.sharding)
    assert (np.asarray(new) == 1).all()
    assert (np.asarray(x) == 0).all()
    assert import_array(x, writable=False, functional=True).finish() is x


@ALONE
def test_what_cannot_be_used_is_refused_with_the_cure(jax):
    x, deleted = jax.numpy.zeros(3), jax.numpy.zeros(3)
    deleted.delete()
    traced = jax.jit(lambda x: import_array(x, writable=False))
    immutable = r"output is a JAX array, which is immutable.*numpy\.empty"
    for call, message in (
        (lambda: import_array(x, writable=True, what="output"), immutable),
        (lambda: import_array(deleted, writable=False), "deleted or donated"),
        (lambda: import_array(jax.random.key(0), writable=False), r"key<fry>; give jax\.random\.key_data\(x\)"),
        (lambda: traced(x), r"traced by JAX .*jax\.pure_callback"),
    ):  # fmt: skip
        with pytest.raises(ArrayError, match=message):
            call()


SHARDED = """
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from fastcoll.arrays.arrays import import_array
x = jax.device_put(np.arange(4.0, dtype="f4"), NamedSharding(Mesh(jax.devices(), "a"), PartitionSpec("a")))
try:
    import_array(x, writable=False)
except ValueError as error:
    print(error)
y = import_array(jax.device_put(np.arange(4), jax.devices()[1]), writable=True, functional=True).finish()
print(*y.devices())
"""


@ALONE
def test_arrays_on_several_devices_are_refused_and_devices_are_kept(jax):
    env = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", SHARDED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env)
    refusal, device = done.stdout.splitlines()
    assert "on 2 devices; give numpy.asarray(x)" in refusal, done.stderr
    assert "1" in device


@pytest.mark.ranks(2)
def test_operations_return_new_arrays(rank: int, jax: Any) -> None:
    jnp = jax.numpy
    x = jnp.full(3, rank + 1.0, "float32")

    def is_new(got: Any, values: list[float]) -> bool:
        return isinstance(got, jax.Array) and got is not x and got.tolist() == values

    for _ in range(2):
        assert is_new(dist.all_reduce(x), [3, 3, 3])
    assert is_new(dist.all_reduce(x, async_op=True).result(), [3, 3, 3])
    assert is_new(dist.all_reduce(x, dist.ReduceOp.PREMUL_SUM(2.0)), [6, 6, 6])
    assert is_new(dist.scan(x), [1, 1, 1] if rank == 0 else [3, 3, 3])
    assert is_new(dist.exscan(x), [1, 1, 1])
    reduced, sent = dist.reduce(x, 1), dist.broadcast(x, 0)
    assert is_new(reduced, [3, 3, 3]) if rank == 1 else reduced is x
    assert is_new(sent, [1, 1, 1]) if rank == 1 else sent is x
    assert is_new(dist.scatter(x, [x + 5, x + 6] if rank == 0 else None, 0), [6.0 + rank] * 3)
    assert x.tolist() == [rank + 1.0] * 3
    with jax.enable_x64(True):
        wide = jnp.full(2, 1.5)
        work = dist.all_reduce(wide, async_op=True)
    assert (work.result().dtype, work.result().tolist()) == (np.float64, [3.0, 3.0])


@pytest.mark.ranks(2)
def test_inputs_of_other_operations(rank: int, jax: Any) -> None:
    x = jax.numpy.full(2, rank, "bfloat16")
    out = np.zeros(4, x.dtype)
    dist.all_gather_into_tensor(out, x)
    assert out.tolist() == [0, 0, 1, 1]
    if rank == 0:
        dist.send(x + 7, 1)
    else:
        got = np.zeros(2, x.dtype)
        dist.recv(got, 0)
        assert got.tolist() == [7, 7]
    for call in (
        lambda: dist.recv(x, 1 - rank),
        lambda: dist.all_gather_into_tensor(jax.numpy.zeros(4, "bfloat16"), x),
        lambda: dist.all_reduce_coalesced([x]),
    ):
        with pytest.raises(ArrayError, match="JAX array, which is immutable"):
            call()
