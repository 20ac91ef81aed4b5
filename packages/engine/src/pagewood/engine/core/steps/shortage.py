"""Pages for running requests when none are left, and who loses them."""

from __future__ import annotations

from collections.abc import Sequence

from pagewood.engine.core.memory.divided_kv import AnyKV
from pagewood.engine.core.queue.pausing import give_back
from pagewood.engine.core.queue.state import EngineState
from pagewood.engine.core.reasons import Notes, Reason
from pagewood.engine.core.request import Request
from pagewood.engine.core.steps.grant import Grant
from pagewood.engine.core.steps.policies import Victim


class Shortage:
    """Finds pages when none are left, within one step. Invariant: an excluded request gets no grant in this step."""

    __slots__ = ("_kv", "_notes", "_relieved", "_state", "_victim", "excluded", "preempted", "revoked")

    def __init__(self, state: EngineState, kv: AnyKV, victim: Victim, notes: Notes | None = None) -> None:
        self._notes = notes
        self._state = state
        self._kv = kv
        self._victim = victim
        self._relieved: set[int] = set()
        """Ranks where a victim was found that can be preempted in the next step only."""  # written by: grow
        self.excluded: list[Request] = []
        """Requests that were preempted, will be in the next step, or could not get a page."""
        # written by: grow, plan, admission
        self.preempted: list[Request] = []
        """Those that have lost their pages, and are not in the queue yet."""  # written by: grow, plan
        self.revoked: list[Request] = []
        """Excluded requests that have a grant already, which must be taken back."""  # written by: grow, plan

    def grow(self, request: Request, num_tokens: int, grants: Sequence[Grant]) -> bool:
        """Give a request pages for its first `num_tokens` positions, preempting worse-ranked ones if needed."""
        while not self._kv.grow(request, num_tokens):
            if give_back(self._state, self._kv, to=request):
                continue
            if request.kv_rank in self._relieved:
                self.excluded.append(request)
                if self._notes is not None:
                    self._notes.note(Reason.NO_PAGE, request)
                return False
            victim = self._victim(self._without_grant(request, grants)) or request
            if victim is request and (lower := self._victim(self._lower_with_grant(request, grants))):
                victim = lower
                self.revoked.append(victim)
            self.excluded.append(victim)
            if victim.num_in_flight:
                self._relieved.add(request.kv_rank)
                if self._notes is not None:
                    self._notes.note(Reason.MUST_LEAVE, victim, request)
                if victim is not request:
                    self.excluded.append(request)
                    if self._notes is not None:
                        self._notes.note(Reason.NO_PAGE, request)
                return False
            if self._notes is not None:
                self._notes.note(Reason.PREEMPTED, victim, request)
            self._kv.release(victim)
            self.preempted.append(victim)
            if victim is request:
                return False
        return True

    def _without_grant(self, request: Request, grants: Sequence[Grant]) -> list[Request]:
        taken = {id(grant.request) for grant in grants} | {id(one) for one in self.excluded}
        return [one for one in self._kv.beside(request, self._state.running) if id(one) not in taken]

    def _lower_with_grant(self, request: Request, grants: Sequence[Grant]) -> list[Request]:
        granted = [grant.request for grant in grants if grant.request.priority < request.priority]
        return [one for one in self._kv.beside(request, granted) if one not in self.excluded]
