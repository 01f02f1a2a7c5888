"""The program of every rank of a comparison: `start.py SIDE FOLDER`, in the Python of that side."""

import sys
from pathlib import Path

if __name__ == "__main__":
    bench = Path(__file__).resolve().parents[1]
    # These two folders replace this script's folder, whose modules are not top-level. The second is for fastcoll, which
    # only its own side imports.
    sys.path[:1] = [str(bench), str(bench.parent)]
    from versus.loop import main

    main(sys.argv[1], Path(sys.argv[2]))
