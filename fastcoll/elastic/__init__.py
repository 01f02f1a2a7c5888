"""Training that outlives deaths: `run` calls a function again with those that are left, and with joiners.

It goes on from the last `State.commit()`. `Sampler` divides the data among however many ranks there are.
"""

from __future__ import annotations

from .sampler import Sampler
from .state import State
from .training import WorldChange, run

__all__ = ["Sampler", "State", "WorldChange", "run"]
