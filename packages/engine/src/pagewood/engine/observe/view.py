"""The live view of an engine: plain data, which is sent unchanged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RequestStage = Literal["compiling", "waiting", "parked", "recalling", "running", "paused", "draining"]
"""The state of a request: its grammar is being compiled; it is queued; it waits for the prompt of another request, for
its tenant, or for KV from a lower tier; it runs; it or the engine is paused; it has ended, but a launched step still
reads its pages."""


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
    """The tenant, as the scheduling policies see it; empty: unknown."""
    service_class: str
    tag: str
    age_s: float
    left_s: float | None
    """Seconds until its deadline; None: no deadline."""
    num_prompt: int
    num_output: int
    """Tokens of output so far."""
    max_output: int
    """Tokens of output at which it ends."""
    num_cached: int | None
    """Tokens of the prompt that were cached when it was first admitted; None before."""
    num_computed: int
    """Leading positions whose KV is in memory."""
    num_pages: int
    """Pages of its row."""


@dataclass(slots=True, kw_only=True)
class StepView:
    """The work of one step. Grants that yield a token for each position decode; all other grants are for prompts."""

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
    """`[num_cells, 3] uint8`: for each run of `pages_per_cell` pages, the shares that are cached, locked and private,
    in 1 / 255. Pages that are locked only because a request has duplicates of them are cached here."""


@dataclass(slots=True, kw_only=True)
class BranchView:
    """A run of pages in the prefix cache, and the sums over it and its successors."""

    parent: int
    """Index of the branch that it follows, which is lower than its own; -1: it begins a sequence."""
    namespace: str
    page: int
    """Id of its first page, which identifies it while it is cached."""
    start: int
    """Tokens before it."""
    num_tokens: int
    """Tokens of the run."""
    num_total: int
    """Tokens of the run and of all after it."""
    num_children: int
    num_leases: int
    """Requests that use its last page, or pages after it."""
    is_locked: bool
    idle: int
    """Operations on the cache since it was last used; 0 if it is locked."""
    num_hits: int
    """Requests admitted with it from the cache since the live view began."""
    tokens: bytes = b""
    """The first token ids, int32, little-endian, if requested."""
    text: str = ""
    """Their text; the engine has no tokenizer and leaves it empty."""


@dataclass(slots=True, kw_only=True)
class TreeView:
    """The largest branches of the prefix cache."""

    branches: tuple[BranchView, ...]
    num_runs: int
    """Runs of the tree that were counted."""
    is_complete: bool
    """Whether the whole tree was visited; if not, sums leave out the deepest runs."""


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
    """First the running requests; then the queued ones by priority and arrival, where the last may be missing; then
    those that were requested by their ids."""
    pool: PoolView
    tree: TreeView | None = None
    """None: this view leaves it out, or there is no prefix cache."""
    steps: tuple[StepView, ...] = ()
    first_tokens_s: tuple[float, ...] = ()
    """For each request that got its first token in these steps, seconds since its arrival."""
    took_s: float = 0.0
    """How long the engine's thread took to make this."""
