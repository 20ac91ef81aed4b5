"""Records what happens on one replica."""

from collections.abc import Sequence
from typing import TypeVar

from pagewood.schedpolicy.simulation.decoding import Decoding
from pagewood.schedpolicy.simulation.machine import Machine
from pagewood.schedpolicy.simulation.memory import Memory
from pagewood.schedpolicy.simulation.metrics import Moment, Observations, Outcome, RequestRecord
from pagewood.schedpolicy.simulation.request import SimRequest
from pagewood.schedpolicy.simulation.service import OUTPUT_COST, PREFILL_COST

K = TypeVar("K")


class Recorder:
    """Fills in the `Observations` of one replica; makes no decisions.

    Invariant: `_by_tenant` and `_token_times` count exactly the decoding requests.
    """

    __slots__ = ("_by_tenant", "_index", "_token_times", "observed")

    def __init__(self, index: int) -> None:
        """Start with no observations; `index` is the number of the replica."""
        self.observed = Observations()
        self._index = index
        self._by_tenant: dict[str, int] = {}
        self._token_times: dict[float, int] = {}
        """Number of decoding requests by the time of their last token; those that decoded last come first."""

    def token_after_prompt(self, request: SimRequest, now_s: float) -> None:
        """Record the token that follows a computed prompt: the first, or the next one after a preemption."""
        self.observed.service.serve({request.tenant: OUTPUT_COST})
        if request.num_generated == 1:
            request.first_token_s = now_s
        else:
            self.observed.gaps.add(now_s - request.last_token_s)
        request.last_token_s = now_s

    def start_decoding(self, request: SimRequest) -> None:
        """Record that a request starts to decode."""
        at_s = request.last_token_s
        self._token_times[at_s] = self._token_times.get(at_s, 0) + 1
        self._by_tenant[request.tenant] = self._by_tenant.get(request.tenant, 0) + 1

    def stop_decoding(self, request: SimRequest) -> None:
        """Record that a decoding request has ended or was preempted."""
        if request.last_token_s not in self._token_times:
            request.last_token_s = next(iter(self._token_times))
        _count_down(self._token_times, request.last_token_s)
        _count_down(self._by_tenant, request.tenant)

    def ran(
        self,
        start_s: float,
        end_s: float,
        num_steps: int,
        prefills: Sequence[tuple[SimRequest, int]],
        decoding: Decoding | None,
        machine: Machine,
    ) -> None:
        """Record steps that have ended.

        Args:
            start_s: Time when they began.
            end_s: Time when they ended.
            num_steps: Number of steps; more than one only without prompts.
            prefills: Prompt tokens that they computed, by request.
            decoding: State of the decoding requests before the steps; None if no request decoded.
            machine: The machine of the replica.
        """
        observed, model = self.observed, machine.model
        observed.num_steps += num_steps
        observed.num_prefill_tokens += sum(num for _, num in prefills)
        observed.busy_s += end_s - start_s
        costs: dict[str, float] = {}
        if decoding is not None:
            num = decoding.num_requests
            observed.num_decode_tokens += num_steps * num
            costs = {tenant: OUTPUT_COST * num_steps * count for tenant, count in self._by_tenant.items()}
            first_s = end_s - start_s
            if num_steps > 1:
                first_s = model.step_s(num_prefill=0, num_decode=num, num_kv=decoding.kv_tokens)
                rise_s = model.kv_s * num
                observed.gaps.add_ramp(first_s + rise_s, rise_s, num_steps - 1, num)
            for at_s, count in self._token_times.items():
                observed.gaps.add(first_s + (start_s - at_s), count)
            self._token_times = {end_s: num}
        for request, num_tokens in prefills:
            costs[request.tenant] = costs.get(request.tenant, 0.0) + PREFILL_COST * num_tokens
        observed.service.serve(costs)

    def ended(self, request: SimRequest, now_s: float, *, refused: str = "") -> None:
        """Record that a request has all its output, or was refused for the given reason."""
        self.observed.records.append(record_of(request, now_s, replica=self._index, refused=refused))

    def moment(self, now_s: float, *, num_running: int, num_waiting: int, memory: Memory) -> None:
        """Record the load at the beginning of a step."""
        if self.observed.timeline.is_due(now_s):
            self.observed.timeline.add(
                Moment(now_s, num_running, num_waiting, memory.num_used, memory.cache.num_evictable)
            )


def _count_down(counts: dict[K, int], key: K) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]


def record_of(request: SimRequest, now_s: float, *, replica: int, refused: str) -> RequestRecord:
    """Return the record of a request that ends now: refused for the given reason, or with all its output."""
    return RequestRecord(
        arrival=request.arrival,
        replica=replica,
        tenant=request.tenant,
        outcome=Outcome.REFUSED if refused else Outcome.FINISHED,
        reason=refused,
        arrived_s=request.sent_s,
        admitted_s=request.admitted_s,
        first_token_s=request.first_token_s,
        finished_s=now_s,
        num_prompt=request.num_prompt,
        num_output=request.num_generated,
        num_hit=max(0, request.num_hit),
        num_preemptions=request.num_preemptions,
        num_recomputed=request.num_recomputed,
        deadline_s=request.deadline_s,
    )
