"""Training that survives the death of ranks: `run` calls a function again, with the remaining ranks and with joiners.

A joiner is a new process that becomes a rank of a running job. Each call continues from the last `State.commit()`.
`Sampler` divides the data among the current number of ranks.
"""

from __future__ import annotations

from .sampler import Sampler
from .state import State
from .training import WorldChange, run

__all__ = ["Sampler", "State", "WorldChange", "run"]
