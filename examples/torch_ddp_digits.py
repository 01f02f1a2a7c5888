"""DistributedDataParallel over fastcoll: a PyTorch network learns scikit-learn's handwritten digits.

    python -m fastcoll.launch -n 2 examples/torch_ddp_digits.py
    torchrun --nproc-per-node 2 examples/torch_ddp_digits.py
    torchrun --nproc-per-node 2 examples/torch_ddp_digits.py --backend gloo

The backend's name in init_process_group makes it run on fastcoll. The import is for TORCH_DEVICE_BACKEND_AUTOLOAD=0.
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import fastcoll.torch  # noqa: F401


def train_and_test_sets():
    digits = load_digits()
    pixels = torch.tensor(digits.data / 16, dtype=torch.float32)
    data = TensorDataset(pixels, torch.tensor(digits.target))
    return torch.utils.data.random_split(data, [0.8, 0.2], torch.Generator().manual_seed(0))


def train_epoch(model, optimizer, batches):
    """One pass over this rank's share; the mean loss over all ranks."""
    total = torch.zeros(())
    for x, labels in batches:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), labels)
        loss.backward()  # here DDP averages the gradients of all ranks
        optimizer.step()
        total += loss.detach()
    dist.all_reduce(total)
    return total.item() / len(batches) / dist.get_world_size()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="fastcoll", help="or gloo")
    parser.add_argument("--epochs", type=int, default=15)
    options = parser.parse_args()

    torch.set_num_threads(1)  # the ranks share the cores
    torch.manual_seed(0)
    dist.init_process_group(options.backend)
    train, test = train_and_test_sets()
    sampler = DistributedSampler(train)
    batches = DataLoader(train, batch_size=32, sampler=sampler)

    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        loss = train_epoch(model, optimizer, batches)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss:.7f}")

    if dist.get_rank() == 0:
        x, labels = test[:]
        print(f"test accuracy {(model.module(x).argmax(1) == labels).float().mean():.1%}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
