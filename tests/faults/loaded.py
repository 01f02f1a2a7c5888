"""What the fork server imports ahead, so that no rank of this folder's tests spends its time on loading it."""

from __future__ import annotations

import gc

import numpy as np

import fastcoll.hybrid.backend
import fastcoll.net.tcp.entries
import fastcoll.rendezvous.methods
import fastcoll.shm.backend
import fastcoll.store.tcp_store
from fastcoll import ReduceOp
from fastcoll.kernels.reduce import reducer

for entry in (*fastcoll.shm.backend.ENTRIES, *fastcoll.net.tcp.entries.ENTRIES):
    entry.compile()
for dtype in ("f4", "f8"):
    reducer(ReduceOp.SUM, np.dtype(dtype))
gc.freeze()  # so that collections in the children look at, and copy, nothing of all this
