"""The error if PyTorch is not installed."""

import subprocess
import sys

CODE = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "torch" else find(name, *rest)
import fastcoll
try:
    import fastcoll.torch
except fastcoll.errors.UnavailableError as error:
    print(error)
assert "torch" not in sys.modules
"""


def test_the_command_that_installs_it_is_named() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "pip install '.[torch]'" in done.stdout
