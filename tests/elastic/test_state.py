"""State: commits keep values, restores bring them back, and no value leaks into another."""

from __future__ import annotations

import copy
import itertools
import pickle
import random
from collections import Counter, defaultdict
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import fastcoll as dist
from fastcoll import UsageError
from fastcoll.elastic import Sampler, State, copies
from fastcoll.elastic.copies import with_buffers, without_arrays

Dice = random.Random


def copied(tree: Any, into: Any = None) -> Any:
    made, write = copies.copied(tree, into)
    write()
    return made


def a_tree(dice: Dice, deep: int = 3) -> Any:
    """Return a tree of a few values, many of them equal."""
    kind = dice.randrange(7 if deep else 5)
    if kind == 5:
        return [a_tree(dice, deep - 1) for _ in range(dice.randrange(4))]
    if kind == 6:
        return {key: a_tree(dice, deep - 1) for key in "abc" if dice.random() < 0.6}
    shape, value = dice.randrange(4), dice.randrange(3)
    leaves = [value, f"text {value}", None, np.full(shape, value / 2), torch.full((shape,), value)]
    return leaves[kind]


def same(x: Any, y: Any) -> bool:
    if isinstance(x, np.ndarray | torch.Tensor):
        return type(x) is type(y) and x.dtype == y.dtype and x.shape == y.shape and bool((x == y).all())
    if isinstance(x, dict):
        return type(x) is type(y) and x.keys() == y.keys() and all(same(x[key], y[key]) for key in x)
    if isinstance(x, list | tuple):
        return type(x) is type(y) and len(x) == len(y) and all(map(same, x, y))
    return bool(type(x) is type(y) and x == y)


def arrays_in(x: Any) -> list[Any]:
    if isinstance(x, dict):
        return [y for key in x for y in arrays_in(x[key])]
    if isinstance(x, list | tuple):
        return [z for y in x for z in arrays_in(y)]
    return [x] if isinstance(x, np.ndarray | torch.Tensor) else []


def test_a_copy_is_equal_and_shares_nothing_with_any_target() -> None:
    """A copy in this process, and one from a skeleton and arrays that were sent apart."""
    for seed in range(300):
        dice = Dice(seed)
        tree, into = a_tree(dice), [a_tree(dice)]
        tree = [tree, *arrays_in(tree)]  # each array is at two places
        before = copy.deepcopy(tree)
        skeleton, arrays = without_arrays(tree)
        assert not arrays_in(skeleton)
        sent, rooms, write = with_buffers(skeleton, copy.deepcopy(into))
        for room, x in zip(rooms, arrays, strict=True):
            room[...] = x
        write()
        made = copied(tree, into)
        assert same(sent, before), seed
        assert same(made, before), seed
        assert same(tree, before), seed
        assert not {id(x) for x in arrays_in(tree)} & {id(x) for x in arrays_in(made)}
        again = copied(tree, made)
        assert [id(x) for x in arrays_in(again)] == [id(x) for x in arrays_in(made)], seed


def test_one_array_at_two_places_stays_one() -> None:
    w = np.arange(3.0)
    kept = copied({"a": w, "b": [w]})
    assert kept["a"] is kept["b"][0]
    other = copied({"a": w, "b": [w + 1]}, kept)
    assert other["a"].tolist() == [0, 1, 2]
    assert other["b"][0].tolist() == [1, 2, 3]


def test_any_course() -> None:
    """Set, alias, remove, write, commit and restore values in any order; a deep copy is the oracle."""
    for seed in range(200):
        dice = Dice(seed)
        state: Any = State(a=a_tree(dice))
        kept = copy.deepcopy(values(state))
        for _ in range(15):
            name, now = dice.choice("abc"), values(state)
            match dice.randrange(6):
                case 0:
                    setattr(state, name, a_tree(dice))
                case 1:
                    setattr(state, name, dice.choice([*now.values(), None]))
                case 2 if name in now:
                    delattr(state, name)
                case 3:
                    for x in arrays_in(now):
                        x += 1
                case 4:
                    state.commit()
                    kept = copy.deepcopy(now)
                case 5:
                    state.restore()
                    assert same(values(state), kept), seed
        state.restore()
        assert same(values(state), kept), seed


def values(state: State) -> dict[str, Any]:
    return {name: value for name, value in vars(state).items() if name in "abc"}


def test_arrays_are_kept_and_restored_in_place() -> None:
    w = np.zeros(3)
    state: Any = State(w=w, layers={"b": w + 1})
    view = w[1:]
    w += 1
    state.commit()
    rooms = [id(x) for x in arrays_in(vars(state)["_kept"])]
    state.commit()
    assert [id(x) for x in arrays_in(vars(state)["_kept"])] == rooms
    w += 5
    state.new = 3
    state.restore()
    assert state.w is w
    assert view.tolist() == [1, 1]
    with pytest.raises(AttributeError, match="the state has no 'new'; it has"):
        _ = state.new


def test_dicts_of_other_types_keep_their_values() -> None:
    counts, groups = Counter(a=1, b=2), defaultdict(list, a=[1])
    state: Any = State(counts=counts, groups=groups)
    state.commit()
    state.counts["a"] += 5
    state.restore()
    state.groups["b"].append(2)
    assert (state.counts, state.groups) == (Counter(a=1, b=2), {"a": [1], "b": [2]})
    assert type(state.counts) is Counter


def test_a_dict_that_has_every_attribute_is_a_dict() -> None:
    class Config(dict[str, Any]):
        def __getattr__(self, name: str) -> Any:
            return self.get(name)

    state: Any = State(config=Config(rate=1), configs=[Config(rate=2)])
    state.config["rate"] = state.configs[0]["rate"] = 3
    state.restore()
    assert (state.config.rate, state.configs[0].rate) == (1, 2)


def test_read_only_arrays_and_new_shapes() -> None:
    fixed = np.arange(3)
    fixed.flags.writeable = False
    state: Any = State(fixed=fixed, grows=np.zeros(1))
    state.grows = np.ones(4)
    state.restore()
    assert (state.fixed.tolist(), state.grows.tolist()) == ([0, 1, 2], [0])


@pytest.mark.filterwarnings("ignore::UserWarning")  # compressed and quantized tensors may change in torch
def test_tensors_that_are_no_plain_memory() -> None:
    """Expanded tensors share elements, and torch cannot copy into sparse or quantized ones of another structure."""
    line, eye = torch.zeros(1), torch.eye(3)
    coded = torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.quint8)
    state: Any = State(wide=line.expand(3), sparse=eye.to_sparse(), rows=eye.to_sparse_csr(), coded=coded)
    line += 1
    state.sparse, state.rows, state.coded = state.sparse * 2, None, None
    state.restore()
    assert state.wide.tolist() == [0, 0, 0]
    assert torch.equal(state.sparse.to_dense(), eye)
    assert torch.equal(state.rows.to_dense(), eye)
    assert state.coded.dequantize().tolist() == [1, 1]
    skeleton, arrays = without_arrays({"wide": line.expand(3), "sparse": eye.to_sparse(), "coded": coded})
    assert len(arrays) == 1
    sent, rooms, _ = with_buffers(pickle.loads(pickle.dumps(skeleton)), {"wide": line.expand(3)})
    assert rooms[0].stride() == (1,)
    assert torch.equal(sent["sparse"].to_dense(), eye)


def test_tensors_stay_on_their_devices() -> None:
    """The device meta, whose tensors have no memory, stands for a GPU."""
    here, there = torch.arange(3.0), torch.empty(3, device="meta")
    skeleton, _ = without_arrays({"x": here, "y": here + 1})
    slots = {name: replace(slot, device="meta") for name, slot in skeleton.items()}
    sent, rooms, write = with_buffers(slots, {"x": there})
    assert sent["x"] is there
    assert [x.device.type for x in (*rooms, sent["y"])] == ["cpu", "cpu", "meta"]
    write()


def test_a_rank_without_a_gpu_receives_tensors_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs choose the device by `torch.cuda.is_available()`, so it can differ between the machines of a job."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    here = torch.arange(3.0)
    skeleton, _ = without_arrays({"x": here, "y": here + 1})
    slots = {name: replace(slot, device="cuda") for name, slot in skeleton.items()}
    sent, rooms, _ = with_buffers(slots, {"x": here})
    assert sent["x"] is here
    assert [x.device.type for x in (*rooms, sent["y"])] == ["cpu", "cpu", "cpu"]


def test_torch_modules_and_optimizers() -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    state: Any = State(model=model, optimizer=optimizer, loss=0.0)

    def step() -> float:
        optimizer.zero_grad()
        loss = (model(torch.arange(12.0).reshape(4, 3)) ** 2).sum()
        loss.backward()
        optimizer.step()
        return loss.item()

    step()
    state.commit()
    losses = [step() for _ in range(3)]
    state.restore()
    assert state.model is model
    assert [step() for _ in range(3)] == losses


def test_a_value_that_cannot_be_copied_is_an_error() -> None:
    with pytest.raises(UsageError, match="a state's sync is a method"):
        State(sync=1)
    with pytest.raises(TypeError):
        State(made=(x for x in range(3)))


def test_objects_with_a_state_dict_that_were_replaced_or_removed_return() -> None:
    first, other = Sampler(5, 2), Sampler(6, 2)
    state: Any = State(replaced=first, removed=first, emptied=first, made=None)
    first.position = 4
    state.commit()
    first.position = 0
    state.replaced, state.emptied, state.made = other, None, other
    del state.removed
    state.restore()
    assert state.replaced is state.removed is state.emptied is first
    assert (first.position, other.position, state.made) == (4, 0, None)


def test_models_in_lists_and_dicts_stay_the_models_of_their_optimizers() -> None:
    models = [torch.nn.Linear(2, 2, bias=False) for _ in range(2)]
    optimizers = {
        name: torch.optim.SGD(each.parameters(), 1.0) for name, each in zip("ab", models, strict=True)
    }
    state: Any = State(models=models, optimizers=optimizers, kind=torch.nn.Linear)
    before = models[1].weight.tolist()
    with torch.no_grad():
        models[1].weight += 1
    state.restore()
    assert models[1].weight.tolist() == before
    assert [*map(id, state.models)] == [*map(id, models)]
    assert state.optimizers["b"] is optimizers["b"]
    assert state.kind is torch.nn.Linear


def test_an_object_that_is_in_a_state_twice_is_copied_once() -> None:
    """Two calls of a module's `state_dict` return different tensors of the same memory."""
    calls = itertools.count()

    class Watched(Sampler):
        def state_dict(self) -> dict[str, Any]:
            next(calls)
            return super().state_dict()

    watched = Watched(5, 2)
    state: Any = State(one=watched, many=[watched])
    assert next(calls) == 1
    watched.position = 4
    state.restore()
    assert (state.one, state.many, watched.position) == (watched, [watched], 0)


def test_a_failed_commit_keeps_the_commit_before_it() -> None:
    state: Any = State(w=np.zeros(2), step=0)
    state.w += 1
    state.step += 1
    state.zone = (x for x in range(3))
    with pytest.raises(TypeError, match="generator"):
        state.commit()
    state.restore()
    assert (state.w.tolist(), state.step, hasattr(state, "zone")) == ([0, 0], 0, False)


def test_an_interrupted_commit_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes after the first array."""
    state: Any = State(v=np.zeros(2), w=np.zeros(2), step=0)
    state.v += 1
    state.w += 1
    state.step += 1
    copyto, calls = np.copyto, itertools.count(1)

    def interrupted(buffer: Any, x: Any) -> None:
        if next(calls) == 2:
            raise KeyboardInterrupt
        copyto(buffer, x)

    with monkeypatch.context() as patch:
        patch.setattr(np, "copyto", interrupted)
        with pytest.raises(KeyboardInterrupt):
            state.commit()
    state.v += 7
    state.restore()
    assert (state.v.tolist(), state.w.tolist(), state.step) == ([1, 1], [1, 1], 1)


@pytest.mark.long
@pytest.mark.ranks(3)
def test_sync_copies_everything() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    model = torch.nn.Linear(2, 2)
    w = np.full(5, float(rank))
    state: Any = State(
        w=w,
        model=model,
        optimizer=torch.optim.Adam(model.parameters()),
        models=[model],
        many=[np.arange(rank + 1), {"x": torch.full((2, rank), rank), "none": None}],
        words={"name": f"rank {rank}"},
        tied=w,
    )
    if rank == size - 1:
        state.extra = "of the last"
        model(torch.ones(1, 2)).sum().backward()
        state.optimizer.step()
    else:
        state.mine = 1
    state.sync(size - 1)
    assert state.w is w
    assert state.tied is w
    assert state.models == [model]
    assert w.tolist() == [size - 1] * 5
    assert state.many[0].tolist() == list(range(size))
    assert state.many[1]["x"].shape == (2, size - 1)
    assert state.words == {"name": f"rank {size - 1}"}
    assert state.extra == "of the last"
    assert not hasattr(state, "mine")
    both = [None] * size
    dist.all_gather_object(both, [*model.state_dict().values(), state.optimizer.state_dict()])
    assert all(same(each, both[0]) for each in both)
    w += 1
    state.restore()
    assert w.tolist() == [size - 1] * 5


@pytest.mark.ranks(2)
def test_a_value_that_cannot_be_pickled_is_an_error_on_all_ranks() -> None:
    state: Any = State(x=1)
    if dist.get_rank() == 0:
        state.x = lambda: 1
    with pytest.raises(UsageError, match="pickle"):
        state.sync(0)
    dist.barrier()


@pytest.mark.ranks(2)
def test_an_object_that_a_rank_lacks_is_an_error_there() -> None:
    """Another object with a `state_dict` than the source has none is replaced by the value of the source."""
    source = dist.get_rank() == 0
    state: Any = State(w=np.full(2, dist.get_rank()), late=None if source else Sampler(5, 2))
    state.sync(0)
    assert state.late is None
    state.late = Sampler(5, 2) if source else None
    text = "the state's late is an object with load_state_dict on rank 0, and not here"
    with nullcontext() if source else pytest.raises(UsageError, match=text):
        state.sync(0)
    dist.barrier()
