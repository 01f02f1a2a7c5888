"""The ranks of bench/inference.py: generate tokens with a model whose layers are split over the ranks.

    torchrun --nproc-per-node 2 bench/inference_ranks.py CLIENT MODEL TOKENS RESULTS

MODEL is the folder of a model, which this program makes if CLIENT is "make" and it runs alone. Rank 0 writes RESULTS, a
JSON file with the tokens and the seconds of each.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

VOCABULARY = 4096
PROMPT = 16  # tokens
WARM_UP = 4  # tokens that are not timed

# 0.26 billion parameters in the shape of Llama; a token needs two all_reduce per layer.
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}


def make(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE)).to(torch.bfloat16).save_pretrained(folder)


def with_transformers(folder: Path) -> Callable[..., Any]:
    """Use tp_plan="auto"; transformers makes the process group."""
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(folder, tp_plan="auto", dtype=torch.bfloat16)


def with_deepspeed(folder: Path, kernel: bool = False) -> Callable[..., Any]:
    """Use DeepSpeed's automatic tensor parallelism; DeepSpeed makes the process group.

    Args:
        kernel: reduce by the kernel in shared memory that DeepSpeed compiles, instead of by torch.distributed.
    """
    import deepspeed
    from transformers import LlamaForCausalLM

    if kernel:
        os.environ["LOCAL_SIZE"] = os.environ["LOCAL_WORLD_SIZE"]  # without it the kernel crashes
    else:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    size = int(os.environ["WORLD_SIZE"])
    return deepspeed.init_inference(model, tensor_parallel={"tp_size": size}, dtype=torch.bfloat16).module


CLIENTS: dict[str, Callable[[Path], Callable[..., Any]]] = {
    "transformers": with_transformers,
    "deepspeed": with_deepspeed,
    "deepspeed-kernel": partial(with_deepspeed, kernel=True),
}


@torch.inference_mode()
def generate(model: Callable[..., Any], count: int) -> tuple[list[int], list[float]]:
    """Return the most likely token after each of `count` steps, and the seconds of each step.

    The text is random, because with random weights a model's own text soon repeats one token.
    """
    text = torch.randint(VOCABULARY, (1, PROMPT + count), generator=torch.Generator().manual_seed(1))
    cache, tokens, seconds = None, [], []
    for step in range(count):
        ids = text[:, PROMPT + step - 1 : PROMPT + step] if step else text[:, :PROMPT]
        start = perf_counter()
        out = model(input_ids=ids, past_key_values=cache, use_cache=True)
        cache, token = out.past_key_values, int(out.logits[0, -1].argmax())
        seconds.append(perf_counter() - start)
        tokens.append(token)
    return tokens, seconds


def main() -> None:
    client, folder, count, results = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    if client == "make":
        return make(folder)
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    tokens, seconds = generate(CLIENTS[client](folder), count + WARM_UP)
    if rank == 0:
        group = type(dist.distributed_c10d._get_default_group()).__name__
        shape = f"{SHAPE['num_hidden_layers']} layers, hidden size {SHAPE['hidden_size']}"
        found = {"group": group, "tokens": tokens, "seconds": seconds[WARM_UP:], "shape": shape}
        results.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
