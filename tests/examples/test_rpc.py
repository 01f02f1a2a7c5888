"""The programs of examples/rpc, run by the commands in their first lines, against training in one process."""

import importlib.util
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "rpc"
needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="needs torch: pip install '.[torch]'"
)


def run(name, *words):
    """Run the command in a program's first lines and return what its ranks print, by rank."""
    command = re.search(
        rf"^    python (-m fastcoll.launch -n \d+ )examples/rpc/{name}$", source(name), re.MULTILINE
    )
    words = [sys.executable, *command[1].split(), str(FOLDER / name), *words]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    printed = re.findall(r"^\[(\d+)\] (.*)$", done.stdout, re.MULTILINE)
    return {int(rank): [line for other, line in printed if other == rank] for rank, _ in printed}


@cache
def source(name):
    return (FOLDER / name).read_text()


@pytest.fixture
def load(monkeypatch):
    """Return a function that imports a program, to use its parts in one process."""

    def loaded(name):
        monkeypatch.syspath_prepend(FOLDER)
        spec = importlib.util.spec_from_file_location(name.removesuffix(".py"), FOLDER / name)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return loaded


def losses(lines):
    return [float(loss) for line in lines for loss in re.findall(r"loss ([\d.]+)", line)]


def accuracy(lines):
    (percent,) = re.findall(r"test accuracy ([\d.]+)%", "\n".join(lines))
    return float(percent)


@pytest.mark.long  # rpc/ tests the functions that it uses, and another program runs always
def test_the_agent_learns_to_balance():
    tested = set(re.findall(r'run\("(\w+\.py)"', Path(__file__).read_text()))
    assert {path.name for path in FOLDER.glob("*.py")} - {"softmax.py"} == tested
    steps = [float(line.split()[-2]) for line in run("reinforce.py")[0]]
    assert len(steps) == 6
    assert steps[0] < 80
    assert steps[-1] > 140


@pytest.mark.long
def test_batched_updates_are_those_of_one_process(load):
    lines = run("batched.py")
    batched = load("batched.py")
    (x, labels), (x_test, test_labels) = batched.train_and_test_sets()
    weights, order = np.zeros(batched.SHAPE), np.random.default_rng(1)
    for _ in range(batched.EPOCHS):
        for batch in np.array_split(order.permutation(len(x)), len(x) // batched.BATCH):
            weights -= batched.RATE * batched.gradient(weights, x[batch], labels[batch]) / len(batch)
    right = (x_test @ weights).argmax(1) == test_labels
    assert float(lines[1][1].split()[-1]) == pytest.approx(np.sum(weights**2), rel=1e-6)
    assert [lines[rank][0] for rank in (1, 2, 3)] == [
        f"{np.sum(right[share::3])} of 120 right" for share in range(3)
    ]
    assert lines[0] == ["120 classifications of 3 images"]
    (line,) = run("parameter_server.py")[0]  # with late gradients
    assert line.startswith("880 updates by 2 trainers")  # 20 epochs of 22 batches each
    assert accuracy([line]) > 93


def trained(steps, forward, loss_of, optimizer):
    """Return the losses of training in one process."""
    expected = []
    for x, labels in steps:
        optimizer.zero_grad()
        loss = loss_of(forward(x), labels)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    return expected


def check(lines, expected, forward, x_test, test_labels):
    """Check that ranks printed every tenth of these losses, and at the end the accuracy of this network."""
    assert losses(lines) == pytest.approx(expected[9::10], rel=0, abs=1e-6)
    right = (forward(x_test).argmax(1) == test_labels).float().mean().item()
    assert right > 0.9
    assert accuracy(lines) == pytest.approx(100 * right, abs=0.06)


@pytest.mark.long  # rpc/ tests the functions that it uses, and another program runs always
@needs_torch
def test_the_split_network_is_that_of_one_process(load):
    import torch
    from torch import nn

    lines = run("split_rnn.py")[0]
    rnn = load("split_rnn.py")
    embedding = rnn.seeded(1, nn.Embedding, len(rnn.ALPHABET), rnn.EMBEDDED)
    lstm = rnn.seeded(2, nn.LSTM, rnn.EMBEDDED, rnn.HIDDEN)
    output = rnn.seeded(3, nn.Linear, rnn.HIDDEN, len(rnn.ALPHABET))
    optimizer = torch.optim.Adam(nn.ModuleList([embedding, lstm, output]).parameters(), lr=rnn.RATE)
    expected = trained(rnn.batches(), lambda x: output(lstm(embedding(x))[0]), rnn.loss_of, optimizer)
    assert expected[-1] < 0.7 * expected[0]
    assert losses(lines) == pytest.approx(expected[9::10], rel=0, abs=1e-6)


@pytest.mark.long  # rpc/ tests the functions that it uses, and another program runs always
@needs_torch
def test_the_pipeline_is_that_of_one_process(load):
    from torch import nn

    lines = run("pipeline.py")[0]
    pipeline = load("pipeline.py")
    network = nn.Sequential(*(pipeline.Stage(number, *sizes) for number, sizes in enumerate(pipeline.STAGES)))
    *steps, test_set = pipeline.batches()
    optimizer = pipeline.OPTIMIZER(network.parameters(), lr=pipeline.RATE)
    check(lines, trained(steps, network, pipeline.cross_entropy, optimizer), network, *test_set)


@pytest.mark.long  # rpc/ tests the functions that it uses, and another program runs always
@needs_torch
def test_ddp_beside_rpc_is_one_process(load):
    import torch

    lines = run("ddp_and_rpc.py")[0]
    both = load("ddp_and_rpc.py")
    table, dense = both.table(), both.dense_layer()
    # DDP averages the gradients of the dense layer; the table gets the sum of both trainers' gradients.
    groups = [
        {"params": table.parameters(), "lr": both.TRAINERS * both.RATE},
        {"params": dense.parameters(), "lr": both.RATE},
    ]
    *steps, test_set = both.batches()
    expected = trained(steps, lambda rows: dense(table(rows)), both.cross_entropy, torch.optim.SGD(groups))
    check(lines, expected, lambda rows: dense(table(rows)), *test_set)
    assert "dense layers equal: True" in lines[-1]
