"""One rank of a measured start: join the job, and write what that took to the folder STARTS_FOLDER."""

import json
import os
import sys
import threading
import time
from pathlib import Path

dialed = []


def note(event, args):
    if event == "socket.connect" and args[0].type.name == "SOCK_STREAM" and isinstance(args[1], tuple):
        dialed.append((args[0].fileno(), *args[1][:2]))


sys.addaudithook(note)

import fastcoll as dist  # noqa: E402
from fastcoll.store.tcp_store import TCPStore  # noqa: E402

asked = [0, 0, 0]  # messages, and the bytes of keys and values sent and received
ask = TCPStore._ask


def counted(store, request):
    answer = ask(store, request)
    asked[0] += 1
    asked[1] += sum(map(len, [*request.keys, *request.values]))
    asked[2] += sum(map(len, answer)) if isinstance(answer, list) else 0
    return answer


TCPStore._ask = counted


def processor(thread):
    """Return the processor seconds of a thread of this process."""
    return int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0]) / 1e9


def began():
    """Return the time, by CLOCK_MONOTONIC, at which this process was started; exact to 10 ms."""
    return int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")


before = time.process_time()
dist.init_process_group()
after = time.process_time()
joined = time.monotonic()
servers = [thread for thread in threading.enumerate() if "store" in thread.name]
record = {
    "began": began(),
    "before": before,
    "init": after - before,
    "server": sum(map(processor, servers)),
    "asked": asked,
    "dialed": len(set(dialed)),
    "joined": joined,
}
dist.barrier()
Path(os.environ["STARTS_FOLDER"], f"{dist.get_rank()}.json").write_text(json.dumps(record))
dist.destroy_process_group()
