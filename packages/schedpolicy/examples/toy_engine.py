"""A toy engine with these policies: it computes nothing, and counts memory and tokens."""

from dataclasses import dataclass
from itertools import islice

from pagewood.schedpolicy import (
    Ageing,
    Budget,
    NewTokenRatio,
    Order,
    SkipAhead,
    by_least_output,
    choose_victims,
    order_named,
)


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """A prompt and its answer, of which only the lengths matter."""

    arrival: int
    arrived_s: float
    num_prompt: int
    max_new_tokens: int
    tenant: str = ""
    priority: int = 0
    num_generated: int = 0
    num_computed: int = 0
    num_matched: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens known so far."""
        return self.num_prompt + self.num_generated


class ToyEngine:
    """Runs jobs in steps of a second. Invariant: what running jobs hold in memory never exceeds `num_slots`."""

    def __init__(self, *, policy: str, num_slots: int, budget: Budget) -> None:
        self.waiting: Order[Job] = Ageing[Job](order_named(policy), after_s=50.0, every=4)
        self.running: list[Job] = []
        self.done: list[Job] = []
        self.num_slots = num_slots
        self.num_preempted = 0
        self.now_s = 0.0
        self.budget = budget
        self.ratio = NewTokenRatio()
        self.skip_ahead = SkipAhead(max_skipped=4, max_passes=8)

    @property
    def num_free(self) -> int:
        """Slots that no job holds."""
        return self.num_slots - sum(job.num_computed for job in self.running)

    def submit(self, job: Job) -> None:
        """Queue a job, unless it could never run."""
        if job.num_prompt + job.max_new_tokens > self.num_slots:
            raise ValueError(f"a job must fit into {self.num_slots} slots, got {job.num_prompt + job.max_new_tokens}")
        self.waiting.add(job)

    def step(self) -> None:
        """Preempt if memory is short, decode every job that can, and use the rest of the step for prompts."""
        self._preempt()
        step = self.budget.open(len(self.running))
        for job in [job for job in self.running if job.num_computed >= job.num_prompt and step.take_decode()]:
            self._compute(job, 1)
        for job in [job for job in self.running if job.num_computed < job.num_prompt]:
            self._compute(job, min(step.take_prefill(job.num_prompt - job.num_computed), self.num_free))
        self.skip_ahead.begin_step(self.waiting)
        admitted: dict[Job, int] = {}
        for job in islice(self.waiting.ordered(self.now_s), 32):
            if not step.can_admit:
                break
            reserved = self.ratio.reserved_tokens(self.running, page_size=1)
            promised = sum(job.num_tokens - job.num_computed for job in self.running)
            if self.ratio.wanted_tokens(job, page_size=1) + reserved + promised > self.num_free and self.running:
                if not self.skip_ahead.pass_over(job):
                    break
                continue
            step.admit()
            self.skip_ahead.admitted(job)
            self.running.append(job)
            admitted[job] = min(step.take_prefill(job.num_tokens), self.num_free)
        for job, num_tokens in admitted.items():
            self.waiting.admit(job)
            self._compute(job, num_tokens)
        self.now_s += 1.0

    def _preempt(self) -> None:
        victims = choose_victims(
            self.running,
            num_available=self.num_free,
            page_size=1,
            num_steps=1,
            rank=by_least_output,
            freed_by=lambda job: job.num_computed,
        )
        for job in victims:
            self.running.remove(job)
            job.num_computed = 0  # without a cache, all computed tokens are lost
            self.waiting.stop(job)
            self.waiting.add(job)
        self.num_preempted += len(victims)
        if victims:
            self.ratio.on_preempt()
        else:
            self.ratio.on_step()

    def _compute(self, job: Job, num_tokens: int) -> None:
        job.num_computed += num_tokens
        if job.num_computed == job.num_tokens:
            job.num_generated += 1
            if job.num_generated == job.max_new_tokens:
                self.running.remove(job)
                self.waiting.stop(job)
                self.done.append(job)
                self.ratio.on_end(job)
