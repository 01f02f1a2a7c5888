"""`python -m fastcoll.shipping LEVEL...`: compile what the warm-up compiles into packs for a wheel.

compiler/shipped.py has the format. The build of a wheel runs this in the folder that becomes the wheel. `all` are all
levels, `native` is the best level of this processor. Like other compiled code, that for a level is kept in the user's
cache directory or in NUMBA_CACHE_DIR, so a later build with the same sources compiles nothing.
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
from .compiler.cache import SOURCES, codes_of_set
from .compiler.cache_files import Places, writable
from .compiler.levels import LEVELS, levels_of, target
from .compiler.processor import cpuid
from .config import cache_folder
from .errors import ResourceError


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
    with tempfile.TemporaryDirectory() as temporary:
        folder = os.environ.get("NUMBA_CACHE_DIR") or str(cache_folder() or temporary)
        try:
            writable(Places([], [folder], are_sets=False), __file__)
        except ResourceError:
            folder = temporary
        for level in sorted({level for name in given.levels for level in sets[name]}):
            path = f"{shipped.FOLDER}/{level}.pack"
            environ = {**os.environ, **target(level), "NUMBA_CACHE_DIR": folder}
            compiles = [sys.executable, "-m", "fastcoll.warmup", "--dtypes", "all"]
            packs = [sys.executable, "-c", f"from fastcoll.shipping import pack; pack({level!r}, {path!r})"]
            for command in compiles, packs:
                subprocess.run(command, env=environ, check=True)
            print(f"{path}: {os.path.getsize(path) / 1e6:.1f} MB", flush=True)


def pack(level: str, path: str) -> None:
    """Write the pack of a level whose target the environment names, from what has been compiled for it."""
    assert SOURCES is not None
    shipped.write(path, level, SOURCES, codes_of_set())


if __name__ == "__main__":
    main(sys.argv[1:])
