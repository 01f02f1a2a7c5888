"""The program of every rank of a comparison: `start.py SIDE FOLDER`, in the Python of that side."""

import sys
from pathlib import Path

if __name__ == "__main__":
    bench = Path(__file__).resolve().parents[1]
    # Not this folder, because its modules are not top-level; only fastcoll's side imports fastcoll.
    sys.path[:1] = [str(bench), str(bench.parent)]
    from versus.loop import main

    main(sys.argv[1], Path(sys.argv[2]))
