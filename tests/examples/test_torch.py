"""The examples with torch learn over fastcoll as they do over Gloo.

The start of torch takes seconds, so one launch runs all examples in the same two ranks; it launches this file.
"""

import io
import json
import os
import re
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import pytest

from fastcoll.launch.nodes import free_port

EXAMPLES = Path(__file__).parents[2] / "examples"
WORDS = {
    "torch_ddp_digits.py": ["--epochs", "3"],
    "torch_transformer.py": ["--steps", "30"],
    "torch_fsdp2.py": ["--steps", "40"],
}
BACKENDS = ("gloo", "fastcoll")  # in this order, see keep_gloo
LAUNCH = ["fastcoll.launch", "-n", "2"]  # tests/pytorch also uses torchrun

pytestmark = [
    pytest.mark.skipif(find_spec("torch") is None, reason="needs torch: pip install '.[torch]'"),
    pytest.mark.long,  # tests/pytorch also compares training with Gloo
]


def run(launch, script, *words):
    """Run a command and return what the ranks print."""
    command = [sys.executable, "-m", *launch, str(script), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(printed):
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]


@pytest.fixture(scope="module")
def printed():
    """Return what rank 0 prints in every example on every backend, by (example, backend)."""
    ports = [str(free_port()) for _ in product(WORDS, BACKENDS)]
    printed_by = json.loads(run(LAUNCH, __file__, *ports).partition("[0] said ")[2].splitlines()[0])
    return {(name, backend): printed_by[name + backend] for name, backend in product(WORDS, BACKENDS)}


@pytest.mark.parametrize("name", WORDS)
def test_losses_are_those_of_gloo(printed, name):
    assert {path.name for path in EXAMPLES.glob("torch_*.py")} == set(WORDS)
    gloo, fastcoll = (losses(printed[name, backend]) for backend in BACKENDS)
    assert len(fastcoll) >= 3
    assert fastcoll[-1] < 0.9 * fastcoll[0]
    assert fastcoll == pytest.approx(gloo, rel=0, abs=1e-5)


def test_a_compiled_step_learns_as_one_that_is_not_compiled():
    script = EXAMPLES / "compiled" / "train_step.py"
    compiled, plain = (run(LAUNCH, script, "--epochs", "2", *words) for words in ([], ["--compiler", "none"]))
    assert losses(compiled) == pytest.approx(losses(plain), rel=0, abs=1e-5)
    assert losses(compiled)[-1] < 0.8 * losses(compiled)[0]
    assert "test accuracy" in compiled


def test_fsdp2_keeps_a_share_on_each_rank(printed):
    kept, total = re.search(
        r"rank 0 keeps ([\d,]+) of ([\d,]+)", printed["torch_fsdp2.py", "fastcoll"]
    ).groups()
    assert 2 * int(kept.replace(",", "")) == int(total.replace(",", ""))


def keep_gloo():
    """Keep all groups of Gloo until the end, and do not destroy them right after a call.

    In torch 2.13 the thread that releases a call's tensors needs the GIL, while the group's destructor holds the GIL
    and joins this thread: a deadlock in one of ten runs, or an abort if Python exits at that moment.
    """
    import torch.distributed as dist

    destroy, kept = dist.destroy_process_group, []

    def keep_and_destroy():
        if dist.get_backend() == "gloo":
            kept.append(dist.group.WORLD)
        destroy()

    dist.destroy_process_group = keep_and_destroy


def main():
    """Run all examples in one rank, each with a store on its own port, and print their output."""
    keep_gloo()
    printed_by = {}
    for port, (name, backend) in zip(sys.argv[1:], product(WORDS, BACKENDS), strict=True):
        os.environ["MASTER_PORT"] = port
        sys.argv = [name, "--backend", backend, *WORDS[name]]
        with redirect_stdout(io.StringIO()) as out:
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        printed_by[name + backend] = out.getvalue()
    print("said", json.dumps(printed_by))


if __name__ == "__main__":
    main()
