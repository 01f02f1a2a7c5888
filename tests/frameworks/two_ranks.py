"""One rank of a program that trains with each framework as users do, and names only the backend "gloo".

It writes the losses, and the class of the group that it used, to a file. The environment chooses the backend.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def data(rank: int = 0) -> TensorDataset:
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1 + rank))
    return TensorDataset(x, x.sum(1, keepdim=True))


def checkpoints() -> list[float]:
    """Save a model that FSDP2 has sharded by torch.distributed.checkpoint, and load it."""
    from torch.distributed import checkpoint
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    net, other = fully_shard(model()), fully_shard(model(1))
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    checkpoint.save(net.state_dict(), checkpoint_id=folder[0])
    state = other.state_dict()
    checkpoint.load(state, checkpoint_id=folder[0])
    other.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))
    return [p.full_tensor().sum().item() for p in other.parameters()]


def torchmetrics() -> list[float]:
    """Compute metrics whose states are sums, and lists of unequal lengths."""
    from torchmetrics import CatMetric, MeanSquaredError
    from torchmetrics.classification import MulticlassAccuracy

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    error, accuracy, everything = MeanSquaredError(), MulticlassAccuracy(3), CatMetric()
    x, y = data(rank).tensors
    error.update(x[:, :1], y)
    accuracy.update(x[:, :3], y[:, 0].long() % 3)
    everything.update(x[: 5 + rank, 0])
    values = everything.compute()
    assert len(values) == 11
    return [error.compute().item(), accuracy.compute().item(), *values.tolist()]


def accelerate() -> list[float]:
    """Train by Accelerate, and run six of its own tests of operations."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    run = Accelerator(cpu=True)
    net = model()
    net, step, batches = run.prepare(net, torch.optim.SGD(net.parameters(), 0.1), DataLoader(data(), 8))
    losses = []
    for x, y in batches:
        step.zero_grad()
        loss = nn.functional.mse_loss(net(x), y)
        run.backward(loss)
        step.step()
        losses += run.gather(loss.detach()[None]).tolist()
    from accelerate.test_utils.scripts import test_ops

    for name in "gather gather_object broadcast pad_across_processes reduce_sum reduce_mean".split():
        getattr(test_ops, f"test_{name}")(run.state)
    AcceleratorState._reset_state(True)
    return losses


def trainer() -> list[float]:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

    set_seed(0)
    net = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=64, n_positions=32))
    ids = torch.randint(0, 64, (32, 32), generator=torch.Generator().manual_seed(0))
    args = TrainingArguments(
        tempfile.mkdtemp(), use_cpu=True, per_device_train_batch_size=4, num_train_epochs=2, logging_steps=1,
        report_to=[], save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    run = Trainer(net, args, train_dataset=[{"input_ids": row, "labels": row} for row in ids])
    run.train()
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def lightning() -> list[float]:
    import lightning

    losses = []

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            x, y = batch
            loss = nn.functional.mse_loss(self.net(x), y)
            self.log("loss", loss, sync_dist=True)
            losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    run = lightning.Trainer(accelerator="cpu", strategy="ddp", devices=2, max_epochs=2, **quiet)
    run.fit(Net(), DataLoader(data(), 8))
    return [*losses, run.callback_metrics["loss"].item()]


def deepspeed() -> list[float]:
    """Train by ZeRO 0 to 3, without DeepSpeed's inference kernel, which would be compiled here."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    x, y = data(dist.get_rank()).tensors
    losses = []
    for stage in range(4):
        config = {
            "train_micro_batch_size_per_gpu": 8,
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
        }
        net = model()
        engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
        for _ in range(4):
            loss = nn.functional.mse_loss(engine(x), y)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.destroy()
    return losses


def llama() -> Any:
    """Return a small Llama whose weights are the same on both ranks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))


def split_by_transformers() -> list[float]:
    """Infer with a model that transformers splits over the ranks, in a process group that it makes itself."""
    folder = tempfile.mkdtemp()
    llama().save_pretrained(folder)
    net = type(llama()).from_pretrained(folder, tp_plan="auto")
    return net(torch.arange(8)[None]).logits.flatten()[:100].tolist()


def split_by_deepspeed() -> list[float]:
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    run = deepspeed.init_inference(llama(), tensor_parallel={"tp_size": 2}, dtype=torch.float32)
    return run.module(torch.arange(8)[None]).logits.flatten()[:100].tolist()


CHECKS: list[Callable[[], list[float]]] = [
    checkpoints,
    torchmetrics,
    accelerate,
    trainer,
    lightning,
    deepspeed,
    split_by_transformers,
    split_by_deepspeed,
]

if __name__ == "__main__":
    torch.set_num_threads(1)
    results, *ports = sys.argv[1:]
    said = {}
    launched = dict(os.environ)
    for check, port in zip(CHECKS, ports, strict=True):  # each check joins again, at its own port
        os.environ.update(
            launched, MASTER_PORT=port
        )  # because Lightning removes the variables that it has read
        values = check()
        said[check.__name__] = {"group": type(dist.group.WORLD).__name__, "values": values}
        Path(results).write_text(json.dumps(said))
        dist.destroy_process_group()
