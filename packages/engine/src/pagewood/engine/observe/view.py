"""What an engine shows of itself in a live view: plain data, which is sent as it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RequestStage = Literal["compiling", "waiting", "parked", "recalling", "running", "paused", "draining"]
"""Where a request stands: its grammar is compiled; it is queued; it waits for the prompt of another one or for its
tenant, or for KV from a lower tier; it runs; it or the engine is paused; it has ended, but a launched step still reads
its pages."""


@dataclass(slots=True, kw_only=True)
class RequestView:
    """One request at one moment. It must not be changed; it is not frozen because a view makes hundreds."""

    request_id: str
    stage: RequestStage
    why: str
    """Why it does not run, in words; empty if it runs."""
    priority: int
    """Higher goes first."""
    tenant: str
    """The sender, as the scheduling policies see it; empty: not known."""
    service_class: str
    tag: str
    age_s: float
    left_s: float | None
    """Until its deadline; None: it has none."""
    num_prompt: int
    num_output: int
    """Tokens of output so far."""
    max_output: int
    """Tokens of output at which it ends."""
    num_cached: int | None
    """Tokens of the prompt that were cached when it was first admitted; None before."""
    num_computed: int
    """Leading positions whose KV is there."""
    num_pages: int
    """Pages of its row."""


@dataclass(slots=True, kw_only=True)
class StepView:
    """What one step computed. A grant that yields a token for each position decodes, every other one is of a prompt."""

    began_s: float
    """On the engine's clock: when it was launched, or when the step before it ended."""
    took_s: float
    num_decodes: int
    num_decode_tokens: int
    num_prompts: int
    num_prompt_tokens: int
    num_admitted: int
    num_cached_tokens: int
    """Prompt tokens that the requests admitted in it found in the cache."""


@dataclass(slots=True, kw_only=True)
class PoolView:
    """The KV memory at one moment: every page is free, cached, locked (cached and in use), or private to a request."""

    num_pages: int
    page_size: int
    num_free: int
    num_cached: int
    num_locked: int
    num_private: int
    pages_per_cell: int
    cells: bytes
    """`[num_cells, 3] uint8`: of each run of `pages_per_cell` pages, the shares that are cached, locked and private, in
    1 / 255. Pages that are locked only because a request has duplicates of them are cached here."""


@dataclass(slots=True, kw_only=True)
class BranchView:
    """A run of pages in the prefix cache, and what follows it."""

    parent: int
    """Index of the branch that it follows, which is lower than its own; -1: it begins a sequence."""
    namespace: str
    page: int
    """Id of its first page, which tells it from all others while it is cached."""
    start: int
    """Tokens before it."""
    num_tokens: int
    """Tokens of the run."""
    num_total: int
    """Tokens of the run and of all after it."""
    num_children: int
    num_leases: int
    """Requests that use its end, or something after it."""
    is_locked: bool
    idle: int
    """Operations on the cache since it was last used; 0 if it is locked."""
    num_hits: int
    """Requests admitted with it from the cache since the live view began."""
    tokens: bytes = b""
    """The first token ids, int32, little-endian, if they are asked for."""
    text: str = ""
    """Their text; the engine has no tokenizer and leaves it empty."""


@dataclass(slots=True, kw_only=True)
class TreeView:
    """The largest branches of the prefix cache."""

    branches: tuple[BranchView, ...]
    num_runs: int
    """Runs in the tree, as far as they were counted."""
    is_complete: bool
    """Whether the whole tree was looked at; if not, sums do not count the deepest runs."""


@dataclass(slots=True, kw_only=True)
class EngineView:
    """An engine at one moment, and its steps since the view before."""

    now_s: float
    """On the engine's clock."""
    paused: Literal["no", "in_place", "retract"]
    num_rows: int
    num_steps: int
    """Since the engine was built."""
    num_preempted: int
    """Since the engine was built."""
    num_requests: int
    requests: tuple[RequestView, ...]
    """Those that run first, then the queued ones in the order of priority and arrival, of which the last may be
    missing; then those that were asked for by their ids."""
    pool: PoolView
    tree: TreeView | None = None
    """None: it has not been looked at this time, or there is no prefix cache."""
    steps: tuple[StepView, ...] = ()
    first_tokens_s: tuple[float, ...] = ()
    """For each request that got its first token in these steps, seconds since its arrival."""
    took_s: float = 0.0
    """How long the engine's thread took to make this."""
