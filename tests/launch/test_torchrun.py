"""One program under torchrun and under fastcoll's launcher: both restart it and set the same variables."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from programs import torchrun

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="needs PyTorch: pip install torch==2.13.0")

PROGRAM = """
import json, os, signal, sys
import numpy as np
import fastcoll as dist
dist.init_process_group(timeout=100)
x = np.ones(2)
dist.all_reduce(x)
restarts, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), dist.get_rank()
os.write(1, f"restart {restarts} rank {rank}: {x.tolist()}\\n".encode())
dist.barrier()
if (restarts, rank) == (0, 1):
    raise ValueError("no data")
if (restarts, rank) == (1, 0):
    os.kill(os.getpid(), signal.SIGKILL)
if (restarts, rank) == (2, 1):
    os._exit(3)
dist.all_reduce(x)  # which fails, but the last time
if restarts == 3:
    os.write(1, f"said {json.dumps(sorted(os.environ))}\\n".encode())
dist.destroy_process_group()
"""
RUNS = {"torchrun": torchrun(), "fastcoll": ("-m", "fastcoll.launch", "--standalone", "--no-prefix")}


@pytest.mark.long  # test_restarts.py has these restarts and variables of fastcoll's launcher
def test_both_restart_after_three_kinds_of_failures_and_set_the_same_variables(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    variables = {}
    for name, words in RUNS.items():
        command = [sys.executable, *words, "--nproc-per-node=2", "--max-restarts=3", "program.py"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        said = sorted(re.findall("^restart .*$", done.stdout, re.M))
        assert said == [f"restart {life} rank {rank}: [2.0, 2.0]" for life in range(4) for rank in range(2)]
        each = re.findall("^said (.*)$", done.stdout, re.M)
        variables[name] = {variable for line in each for variable in json.loads(line)}
    assert "TORCHELASTIC_RUN_ID" in variables["torchrun"]
    # The import of torch sets the last two.
    assert variables["torchrun"] - variables["fastcoll"] <= {"KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"}
