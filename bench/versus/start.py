"""What every rank of a comparison runs: `start.py SIDE FOLDER`, in the Python of that side."""

import sys
from pathlib import Path

if __name__ == "__main__":
    bench = Path(__file__).resolve().parents[1]
    # Not this folder, whose modules are no top-level ones; fastcoll's own side imports fastcoll, the others do not.
    sys.path[:1] = [str(bench), str(bench.parent)]
    from versus.loop import main

    main(sys.argv[1], Path(sys.argv[2]))
