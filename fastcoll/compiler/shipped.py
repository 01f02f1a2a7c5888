"""Machine code that is shipped in a wheel, so that nothing compiles at first use.

`_compiled/LEVEL.pack` in the package has the code of all functions that `python -m fastcoll.warmup` compiles, for one
of the processors' levels (levels.py). The best pack that this processor can run is used. Code in a pack calls neither
Numba nor llvmlite, so the user's versions of them do not matter. It depends on the sources, on the version of Python
and on the layout of Python's objects; kernels/pyobjects.py checks the layout of NumPy's. A pack begins with a digest of
these (the *stamp*):

    bytes 0 to 15    the stamp
    bytes 16 to 19   number of bytes of the index
    the index        a line for each function: its name, and the offset and size of its record
    the records      a digest of the code, 16 bytes, and the code: an object file (machine_code.py)

A pack with another stamp is not used, and the first function that is needed logs that. Packs are trusted as the sources
are (cache_files.py).
"""

from __future__ import annotations

import logging
import mmap
import os
import sys
from collections.abc import Mapping
from functools import cache

from . import cache_files
from .cache_files import digest
from .levels import levels_of
from .processor import cpuid

_log = logging.getLogger("fastcoll")
_PACKAGE = os.path.dirname(os.path.dirname(__file__))
FOLDER = f"{_PACKAGE}/_compiled"


class _Pack:
    """A pack's content, and the offset and size of the record of each function."""

    def __init__(self, content: mmap.mmap) -> None:
        self.content = content
        self.records: dict[str, tuple[int, int]] = {}
        begin = 20 + int.from_bytes(content[16:20], "little")
        for line in content[20:begin].decode().splitlines():
            name, start, size = line.rsplit(" ", 2)
            self.records[name] = begin + int(start), int(size)


def code(name: str, sources: str) -> bytes | None:
    """Return the shipped code of a function, or None if there is none that fits.

    Args:
        name: the function's name in packs (`KernelCache`).
        sources: the hash of this package's sources.
    """
    if any(os.environ.get(f"NUMBA_CPU_{what}") for what in ("NAME", "FEATURES")):
        return None  # the user has chosen the processor to compile for
    pack = _fitting_pack(sources)
    if pack is None or name not in pack.records:
        return None
    start, size = pack.records[name]
    found = pack.content[start + 16 : start + size]
    return found if digest(found) == pack.content[start : start + 16] else None


def write(path: str, level: str, sources: str, codes: Mapping[str, bytes]) -> None:
    """Write a pack, for the Python that runs this."""
    start, lines, records = 0, [], []
    for name, each in sorted(codes.items()):
        records.append(digest(each) + each)
        lines.append(f"{name} {start} {len(records[-1])}")
        start += len(records[-1])
    index = "\n".join(lines).encode()
    with open(path, "xb") as file:
        file.write(_stamp(level, sources) + len(index).to_bytes(4, "little") + index + b"".join(records))


def _stamp(level: str, sources: str) -> bytes:
    layout = f"{sys.implementation.cache_tag} {object.__basicsize__} {tuple.__basicsize__}"
    return digest(level.encode(), sources.encode(), layout.encode())


@cache
def _fitting_pack(sources: str) -> _Pack | None:
    """Return the pack of the best level that this processor has and the wheel ships."""
    if not os.path.isdir(FOLDER):
        return None
    for level in reversed(levels_of(cpuid())):
        file = cache_files.opened(FOLDER, f"{level}.pack", __file__)
        if file is None:
            continue
        with file:
            content = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        if content[:16] == _stamp(level, sources):
            return _Pack(content)
        _log.warning(
            "%s/%s.pack is not used, since it was made for other sources or another Python: kernels compile at first "
            "use; install the wheel again",
            FOLDER,
            level,
        )
        return None
    return None
