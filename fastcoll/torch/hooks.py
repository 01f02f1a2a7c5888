"""Communication hooks for DistributedDataParallel (`model.register_comm_hook(state, hook)`).

DDP compares the annotations of a hook with types, so this file does not postpone their evaluation.
"""

from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

from ..core.reduce_op import ReduceOp
from ..core.travel import refuse_unknown
from ..errors import UsageError
from . import calls as c
from .process_group import FastcollProcessGroup
from .work import PendingWork

Hook = Callable[[dist.ProcessGroup | None, dist.GradBucket], torch.futures.Future[torch.Tensor]]


def travel(travel: str, feedback: bool = True) -> Hook:
    """Return a hook that averages gradients of float32 as `fastcoll.all_reduce(travel=...)` does.

    The state to register with the hook is the model's process group, or None for the default group, as for torch's
    default hooks. A hook serves one model, because it keeps what rounding takes from each bucket.

    Args:
        travel: "bfloat16", "float16" or "int8".
        feedback: whether to add what rounding took from a bucket to the same bucket in the next step.

    Raises:
        UsageError: the type is unknown; in the backward pass: the group is not one of fastcoll.
        ArrayError: in the backward pass: the gradients are not float32.

    Examples:
        >>> model = DistributedDataParallel(net)
        >>> model.register_comm_hook(None, fastcoll.torch.hooks.travel("bfloat16"))
    """
    refuse_unknown(travel)
    lost: dict[int, np.ndarray] = {}

    def travel_hook(
        state: dist.ProcessGroup | None, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        group = dist.group.WORLD if state is None else state
        if not isinstance(group, FastcollProcessGroup):
            raise UsageError(
                f"the hook's state is {group!r}; give a group of the backend fastcoll, or None for the default group"
            )
        x, kept = bucket.buffer(), None
        if feedback:
            kept = lost.get(bucket.index())
            if kept is None or kept.size != x.numel():  # DDP makes new buckets after the first step
                kept = lost[bucket.index()] = np.zeros(x.numel(), np.float32)
        reduce = c.recorded(group.fastcoll.all_reduce_narrow)
        work = c.started(reduce, (x, ReduceOp.AVG), travel=travel, lost=kept)
        return PendingWork([work], [x]).get_future().then(lambda future: future.value()[0])

    return travel_hook
