"""The state of a group's ranks as seen over the network: notices, broken connections, and processes in sight."""

from __future__ import annotations

from collections.abc import Sequence

from ...core.members import Member, dead_among
from ...core.monitor import FAILED, IN_ORDER, LEAVING, LEFT, Vigil
from ...errors import CollectiveTimeoutError, GroupError, PeerDiedError
from .control import Control
from .notice import Notice


class NetVigil(Vigil):
    """What a rank knows of the others by its control connections.

    A peer whose connection ends without a notice has died, or cannot be reached any more, which comes to the same.
    What a failed rank blames is blamed here too: the first survivor to see a death may be gone before the others
    look, and they must still name who died.
    """

    def __init__(self, members: Sequence[Member], rank: int, control: Control) -> None:
        super().__init__(members, rank)
        self._control = control
        self._broken: dict[int, str] = {}
        self._taken: tuple[GroupError, Notice] | None = None  # our failure that a notice led to

    def lost(self, rank: int, how: str) -> None:
        """A data or mail connection with a group rank broke; a verdict unless that rank has left or failed."""
        self._broken.setdefault(rank, how)

    def lost_processes(self) -> list[Member]:
        """For `processes.gone_among`."""
        self._control.look()
        return [self.members[rank] for rank in self._suspects()]

    def has_left(self, rank: int) -> bool:
        self._control.look()
        return self._state(rank) in (LEFT, LEAVING)

    def verdict(self, needed: Sequence[int], doing: str) -> GroupError | None:
        if self.failure is not None:
            return self.failure
        # First who died, then what they said: a process says that it leaves before it ends.
        proven = set(dead_among(self.members))
        self._control.look(again=bool(proven))
        proven -= {member for rank, member in enumerate(self.members) if not self._is_present(rank)}
        return (
            self._death(proven, doing) or self._failure_of_peer(doing) or super().verdict(needed, doing)
        )  # fmt: skip

    def _death(self, proven: set[Member], doing: str) -> PeerDiedError | None:
        """Who died, by our own sight or by what others say."""
        suspects = {self.members[rank]: how for rank, how in self._suspects().items()}
        report = self._report()
        told = set(report.ranks) if report is not None else set()
        told_members = {member for member in self.members if member.rank in told}
        culprits = sorted(proven | set(suspects) | told_members, key=lambda member: member.rank)
        if not culprits:
            return None
        names = ", ".join(map(str, culprits))
        if proven.issuperset(culprits):
            text = f"{names} died; {doing}"
        else:
            how = ", ".join(dict.fromkeys(suspects.values()))
            text = f"{names} died or lost its connection{f' ({how})' if how else ''}; {doing}"
        error = PeerDiedError(text, [member.rank for member in culprits])
        if report is not None and told == set(error.ranks):
            self._taken = (error, report)
        return error

    def _suspects(self) -> dict[int, str]:
        """Group ranks whose connection broke, and how, that have neither left nor failed."""
        broken = {**self._broken, **self._control.lost}
        return {rank: how for rank, how in broken.items() if self._is_present(rank)}

    def _report(self) -> Notice | None:
        """The first notice that says that somebody other than us died."""
        me = self.members[self._rank].rank
        notices = list(self._control.heard.values())
        return next((each for each in notices if each.died and set(each.ranks) - {me}), None)

    def _failure_of_peer(self, doing: str) -> GroupError | None:
        """The failure that a peer has told, for which it or whoever it blames is at fault."""
        for notice in list(self._control.heard.values()):
            if notice.state == FAILED:
                error = self._passed_on(notice.origin, notice.text, notice.ranks, notice.late, doing)
                self._taken = (error, notice)
                return error
        return None

    def _publish(self, state: int, reason: str) -> None:
        self._control.say(self._notice(state, reason))

    def _notice(self, state: int, reason: str) -> Notice:
        if state != FAILED or self.failure is None:
            return Notice(state, self._rank, text=reason)
        taken = self._taken
        if taken is not None and taken[0] is self.failure:
            return taken[1]  # passed on as it was, not wrapped into another "failed the group"
        died, late = (isinstance(self.failure, kind) for kind in (PeerDiedError, CollectiveTimeoutError))
        return Notice(FAILED, self._rank, self.failure.ranks, died, late, reason)

    def _state(self, rank: int) -> int:
        notice = self._control.heard.get(rank)
        return IN_ORDER if notice is None else notice.state

    def _is_present(self, rank: int) -> bool:
        return self._state(rank) in (IN_ORDER, LEAVING)

    def _states(self) -> list[int]:
        return [self._state(rank) for rank in range(len(self.members))]

    def _reason(self, rank: int) -> str:
        return self._control.heard[rank].text

    def _dead(self, working: Sequence[Member]) -> list[Member]:
        return dead_among(working)
