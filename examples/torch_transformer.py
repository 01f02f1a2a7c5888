"""A small transformer learns to continue five sonnets, character by character, on all ranks together.

    python -m fastcoll.launch -n 2 examples/torch_transformer.py
    torchrun --nproc-per-node 2 examples/torch_transformer.py --steps 1000

Every rank draws its own passages of the text; DistributedDataParallel averages the gradients over fastcoll
(or --backend gloo) while backward still runs.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import fastcoll.torch  # noqa: F401

TEXT = Path(__file__).with_name("sonnets.txt").read_text()  # Shakespeare's 18, 29, 73, 116 and 130
ALPHABET = sorted(set(TEXT))
CONTEXT, BATCH, WIDTH, HEADS, LAYERS = 64, 16, 64, 4, 2


class Transformer(nn.Module):
    """Scores for the character after each of the given ones."""

    def __init__(self):
        super().__init__()
        self.characters = nn.Embedding(len(ALPHABET), WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.scores = nn.Linear(WIDTH, len(ALPHABET))

    def forward(self, text):
        length = text.shape[1]
        x = self.characters(text) + self.places(torch.arange(length))
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        return self.scores(self.layers(x, mask=mask, is_causal=True))


def passages(text, generator):
    """A batch of passages, and the same ones a character later."""
    starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=generator)
    places = starts + torch.arange(CONTEXT + 1)
    return text[places[:, :-1]], text[places[:, 1:]]


@torch.no_grad()
def continued(model, start, length):
    text = [ALPHABET.index(character) for character in start]
    for _ in range(length):
        scores = model(torch.tensor([text[-CONTEXT:]]))[0, -1]
        text.append(int(scores.argmax()))
    return "".join(ALPHABET[number] for number in text)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="fastcoll", help="or gloo")
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()

    torch.set_num_threads(1)  # the ranks share the cores
    torch.manual_seed(0)
    dist.init_process_group(options.backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(Transformer())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = torch.tensor([ALPHABET.index(character) for character in TEXT])
    generator = torch.Generator().manual_seed(rank)

    for step in range(1, options.steps + 1):
        x, following = passages(text, generator)
        loss = cross_entropy(model(x).flatten(0, 1), following.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            loss = loss.detach()
            dist.all_reduce(loss)
            if rank == 0:
                print(f"step {step}: loss {loss / size:.7f}")

    if rank == 0:
        print(continued(model.module, "Shall I ", 60))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
