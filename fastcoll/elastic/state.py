"""State: what training goes on from, kept as of the last commit and the same on all ranks after a change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..api.collectives import broadcast
from ..api.objects import broadcast_object_list
from ..core.operands import whole
from ..errors import UsageError
from ..job.groups import get_rank
from .copies import Tree, copied, with_buffers, without_arrays


class State:
    """Values that outlive deaths of ranks, as attributes; further ones may be added, and all be set to others.

    A value is one of these, or a dict, list or tuple of the first two:
      - an array (NumPy's or torch's): copied in place, and broadcast;
      - anything that can be copied by `copy.deepcopy` and pickled, also arrays of other libraries;
      - what has `state_dict` and `load_state_dict`: torch's modules and optimizers, a `Sampler`.

    Names that begin with an underscore are left alone. What was given at first counts as committed.

    Args:
        values: the attributes.

    Raises:
        UsageError: an attribute would hide a method.

    Example:
        >>> state = elastic.State(weights=np.zeros(10), step=0)
        >>> state.step += 1
        >>> state.commit()
    """

    def __init__(self, **values: Any) -> None:
        if hidden := values.keys() & set(dir(State)):
            raise UsageError(
                f"a state's {', '.join(sorted(hidden))} is a method; give the value another name"
            )
        vars(self).update(values)
        self._at_commit: Callable[[], None] | None = None
        self._kept: dict[str, Tree] = copied(self._trees())

    def __getattr__(self, name: str) -> Any:  # for type checkers: attributes are the program's own
        raise AttributeError(f"the state has no {name!r}; it has {', '.join(self._trees())}")

    def commit(self) -> None:
        """Keep the values as they are now: from here work is done again after a death.

        Arrays are copied into memory that is kept for it. Under `run` all ranks call this at the same places, and
        joiners are taken in here; where there may be any, it takes one broadcast of 16 bytes.

        Raises:
            GroupError: a rank has died. The values are kept by then.
        """
        self._kept = copied(self._trees(), self._kept)
        if self._at_commit is not None:
            self._at_commit()

    def restore(self) -> None:
        """Set all values to those of the last commit; arrays in place. Attributes added since are removed."""
        self._put(copied(self._kept, self._trees()))

    def sync(self, src: int = 0) -> None:
        """Take over, and keep, the values of rank `src`; collective. Arrays of the same shape are written in place.

        Args:
            src: a rank of the default group.

        Raises:
            UsageError: a value cannot be pickled; MismatchError on the other ranks.
            GroupError: a rank has died. Values may be half written then; `restore` brings those of the last commit.
        """
        mine, is_source = self._trees(), get_rank() == whole("src", src)
        skeleton, arrays = without_arrays(mine) if is_source else (None, [])
        box = [skeleton]
        broadcast_object_list(box, src)
        if not is_source:
            mine, arrays = with_buffers(box[0], mine)
        if arrays:
            broadcast(arrays, src)
        if not is_source:
            self._put(mine)
        self._kept = copied(self._trees(), self._kept)

    def at_commit(self, call: Callable[[], None] | None) -> None:
        """Call this at the end of each commit; None: nothing."""
        self._at_commit = call

    def _trees(self) -> dict[str, Tree]:
        values = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return {name: value.state_dict() if _loads(value) else value for name, value in values.items()}

    def _put(self, trees: dict[str, Tree]) -> None:
        for name in self._trees().keys() - trees.keys():
            delattr(self, name)
        for name, tree in trees.items():
            value: Any = vars(self).get(name)
            if _loads(value):
                value.load_state_dict(tree)
            else:
                setattr(self, name, tree)


def _loads(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
