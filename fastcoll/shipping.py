"""`python -m fastcoll.shipping LEVEL...`: compile what the warm-up compiles into packs for a wheel.

compiler/shipped.py has the format.
The build of a wheel runs this in the folder that becomes the wheel. `all` are all levels, `native` is the best level of
this processor.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .compiler import shipped
from .compiler.cache import SOURCES
from .compiler.levels import LEVELS, levels_of, target
from .compiler.machine_code import cpuid


def main(arguments: Sequence[str] | None = None) -> None:
    """Write a pack for each level."""
    assert SOURCES is not None, "the sources are in an archive"
    about = (__doc__ or "").partition(": ")[2]
    parser = argparse.ArgumentParser(prog="python -m fastcoll.shipping", description=about)
    known = {level.name: [level.name] for level in LEVELS}
    sets = known | {"all": list(known), "native": levels_of(cpuid())[-1:]}
    parser.add_argument("levels", nargs="+", choices=sets)
    given = parser.parse_args(arguments)
    Path(shipped.FOLDER).mkdir()
    for level in sorted({level for name in given.levels for level in sets[name]}):
        with tempfile.TemporaryDirectory() as folder:
            environ = {**os.environ, **target(level), "NUMBA_CACHE_DIR": folder}
            command = [sys.executable, "-m", "fastcoll.warmup", "--dtypes", "all"]
            subprocess.run(command, env=environ, check=True)
            codes = {}
            for file in Path(folder).rglob("*.code"):  # fastcoll-USER/SET/FUNCTION.PLATFORM.code
                name = file.name.rsplit(".", 2)[0]
                assert name not in codes, name
                codes[name] = file.read_bytes()[32:]
            path = f"{shipped.FOLDER}/{level}.pack"
            shipped.write(path, level, SOURCES, codes)
        print(f"{path}: {os.path.getsize(path) / 1e6:.1f} MB", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
