"""What every rank of a comparison runs: `start.py SIDE FOLDER`, in the Python of that side.

A peer's environment need not have fastcoll. So where this is run as a file, the benchmark's folder becomes
a package of its own, of which only modules are imported that need NumPy alone.
"""

import sys

if not __package__:
    del sys.path[0]  # this folder, whose modules are no top-level ones

from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path


def _package() -> str:
    if __package__:
        return __package__
    bench = Path(__file__).resolve().parents[1]
    spec = spec_from_file_location(
        "fastcoll_bench", bench / "__init__.py", submodule_search_locations=[str(bench)]
    )
    assert spec is not None
    sys.modules["fastcoll_bench"] = module_from_spec(spec)
    return "fastcoll_bench.versus"


if __name__ == "__main__":
    import_module(f"{_package()}.loop").main(sys.argv[1], Path(sys.argv[2]))
