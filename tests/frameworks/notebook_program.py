"""A Jupyter kernel whose cells start ranks."""

import sys

from jupyter_client.manager import start_new_kernel

RUN = """
import numpy as np
import fastcoll
def total():
    x = np.full(3, fastcoll.get_rank() + 1.0)
    fastcoll.all_reduce(x)
    return x[0]
print([float(x) for x in fastcoll.run(total, 2)])
"""
SPAWN = "fastcoll.spawn(total, nprocs=2)"


def cell(client, code: str) -> str:
    """Run a cell; return its output or its error."""
    said: list[str] = []

    def hear(message) -> None:
        content = message["content"]
        said.append(content.get("text", "") + "".join(content.get("traceback", ())))

    client.execute_interactive(code, timeout=120, output_hook=hear)
    return "".join(said)


if __name__ == "__main__":
    manager, client = start_new_kernel()
    try:
        sys.stdout.write(cell(client, RUN) + cell(client, SPAWN))
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
