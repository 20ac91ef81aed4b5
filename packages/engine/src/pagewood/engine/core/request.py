"""One request from its arrival to its last answer: data, and numbers derived from it.

Positions of a request, left to right:

    0        num_computed      num_launched       num_known          length         max_length
    |  KV readable  |  KV being written  |  token known to the host  |  promised  |  not yet promised

`num_launched` runs ahead of `num_computed` by the steps in flight. `length` runs ahead of `num_known` by the tokens
that launched steps may yield and that the host has not seen yet. With drafts both are upper bounds until the steps are
retired, because steps may yield fewer tokens than they promised.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from math import inf
from typing import Literal

import numpy as np

from pagewood.engine.api import CachedPrefix, FinishReason, SamplingParams, TokenLogprob
from pagewood.engine.core.adapter import Activation, Adapter
from pagewood.engine.core.cache_keys import Key
from pagewood.engine.core.images import Encoding, PromptImages
from pagewood.engine.core.inner_rows import InnerRows
from pagewood.engine.core.masks.constrain import Compiling
from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.pooling import Pool
from pagewood.engine.core.timeline import Timeline
from pagewood.engine.grammar.matcher import Matcher

_NO_PAGES: Int32 = np.empty(0, np.int32)
_TOKEN_BYTES = 4


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """A request of the engine. Invariant: num_computed <= num_launched <= length."""

    request_id: str
    sampling: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    priority: int
    """The priority for decisions: `own_priority`, or the higher one of a request that is parked behind its prompt."""
    # written by: intake, waiting
    own_priority: int = field(init=False)
    """The priority that the client gave it, at submission or later."""  # written by: intake
    key: Key
    """What its KV depends on besides its tokens; requests share cached prefixes only if their keys are equal."""
    # written by: renewal, kv
    renewed_key: Key = None
    """Its key when it is admitted again, because the weights have changed while it had a row: the cache gets no more of
    its KV until then. None: nothing has changed."""  # written by: renewal, kv
    is_long: bool = False
    """Whether it has the second set of factors of a model with two, see `CacheKeys`."""
    adapter: Adapter | None = None
    """What computes it beside the model, the same from its arrival to its end; None: the model alone."""
    activation: Activation | None = None
    """Where its adapter begins to compute; None: at the first position."""
    images: PromptImages | None = None
    """The images of its prompt, once they are encoded; None: it has none."""  # written by: intake
    encoding: Encoding | None = None
    """Its images, while they are being encoded."""  # written by: intake, renewal
    carry: bytes
    arrival: int
    """Arrival number, unique; a preempted request keeps it."""
    arrived_s: float
    deadline_s: float = inf
    """Time by which it should have ended, on the engine's clock."""
    tenant: str = ""
    """The tenant whose quota and share of the engine it uses."""
    service_class: str = ""
    tag: str = ""
    retain_s: float | None = None
    """For how long after its end its prefix is likely to be used again; 0: it will not be, None: unknown."""
    explains: bool = False
    """Whether its first answer says what was cached of its prompt, and when it was admitted."""
    timeline: Timeline | None = None
    """The times that its last answer reports; None: no times."""
    num_prompt: int
    is_search: bool = False
    """Whether it is a step of beam search."""
    keeps_stop_token: bool = False
    """Whether the stop token that ends it is answered too."""
    max_length: int
    """Tokens of prompt plus output at which it ends."""

    tokens: Int32
    """[max_length] token ids, valid up to num_known."""  # written by: retire
    num_known: int
    """Tokens that the host knows."""  # written by: retire
    num_computed: int = 0
    """Leading positions whose KV is computed."""  # written by: retire, kv
    num_unscored: int = 0
    """Trailing prompt tokens whose log probabilities are wanted and not known yet."""  # written by: retire
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    """Log probabilities of prompt tokens, from the first reported one on, that are known and not answered yet."""
    # contents written by: retire
    num_kept: int = 0
    """Tokens that were reported for `SamplingParams.kept_tokens`."""  # written by: retire
    pool: Pool | None = None
    """The vector that it asks for; None: it asks for tokens."""  # contents written by: retire
    experts: InnerRows | None = None
    """The experts of its positions; None: it asks for none."""  # contents written by: retire
    states: InnerRows | None = None
    """Their hidden states; None: it asks for none."""  # contents written by: retire
    finish: FinishReason | None = None  # written by: retire
    pause: Literal["no", "in_place", "retract"] = "no"
    """Whether it is paused alone, and whether it then keeps its memory."""  # written by: pausing
    was_paused: bool = False
    """Whether it was ever paused alone, so that the limits of the queue do not apply to it."""  # written by: pausing
    answered: bool = False
    """Whether its first `Delta` has been made."""  # written by: retire

    num_launched: int = 0
    """Positions handed to the device since it was admitted; more than will be valid, if drafts may be rejected."""
    # written by: launched, speculation
    num_unseen: int = 0
    """Tokens promised by launched steps, the most that they may yield."""  # written by: launched, loop, retire
    num_drafted: int = 0
    """Draft tokens that were verified for it."""  # written by: speculation
    num_accepted: int = 0
    """Draft tokens that were accepted."""  # written by: speculation
    num_foreseen: int = 0
    """Tokens promised by launched steps that are known already, because the grammar forces them."""
    # written by: retire
    num_untold: int = 0
    """Trailing known tokens that no launched step has drawn or received."""  # written by: retire, loop
    matcher: Matcher | None = None
    """Its state in its grammar, after all known tokens; None: it has no grammar."""  # written by: intake
    mask_ms: int = 0
    """Milliseconds that its grammar has lately taken for a token; 0 for nearly all grammars."""  # written by: retire
    mask_turn: int = 0
    """When its slow grammar last had its turn."""  # written by: mask_turns
    compiling: Compiling | None = None
    """Its grammar, while it is being compiled."""  # written by: intake
    threshold: float = 0.0
    """Share of what could come from the cache below which it ends before it is queued."""
    probe: object = None
    """The question to the cache what it has of the prompt, until it is answered; None: nothing is asked."""
    # written by: intake, renewal
    awaits_kv: bool = False
    """Whether it waits for pages of its prompt that another engine publishes."""
    num_in_flight: int = 0
    """Launched steps that read or write its pages."""  # written by: launched, loop

    num_matched: int = 0
    """Leading tokens whose KV is cached; kept up to date while it waits, fixed when it is admitted."""
    # written by: waiting, kv, divided_kv, deadlines
    num_cached: int = -1
    """Tokens found in the cache when it was first admitted; -1 before that."""  # written by: kv
    cached_prefix: CachedPrefix | None = None
    """Why the cached prefix was not longer; None: the request does not ask."""  # written by: kv
    admitted_s: float = 0.0
    """When it was first admitted, on the engine's clock, if that is asked for."""  # written by: admission
    kv_rank: int = 0
    """The rank that has its pages, where ranks divide them by request; while it waits, the one chosen last."""
    # written by: divided_kv, waiting
    row: int = -1
    """Its row in the device tables; -1 if it has none."""  # written by: kv
    pages: Int32 = field(default_factory=lambda: _NO_PAGES)
    """[capacity] page ids, valid up to num_pages; append-only while it runs."""  # written by: kv
    num_pages: int = 0  # written by: kv
    num_published: int = 0
    """Leading pages that have been offered to the cache; the request owns those after them."""  # written by: kv
    num_passed: int = 0
    """Leading pages that it reads only in layers without a window."""  # written by: kv
    duplicates: tuple[tuple[int, int], ...] = ()
    """Ranges [start, end) of published pages that it owns, because the cache had others for the same tokens."""
    # written by: kv
    lease: object = None
    """Locked path in the cache that covers its published pages; None without a row."""  # written by: kv

    def __post_init__(self) -> None:
        self.own_priority = self.priority

    @property
    def has_ended(self) -> bool:
        """Whether its last answer has been made."""
        return self.finish is not None

    @property
    def foreseen(self) -> int | None:
        """The token that the latest launched step will draw, if it is known already."""
        return int(self.tokens[self.num_launched]) if self.num_foreseen else None

    @property
    def length(self) -> int:
        """Tokens known and promised."""
        return self.num_known + self.num_unseen

    @property
    def is_resumed(self) -> bool:
        """Whether it has output and is no search: if it has not run here, another engine had accepted it before."""
        return self.num_known > self.num_prompt and not self.is_search

    @property
    def num_tokens(self) -> int:
        """Tokens that the host knows."""
        return self.num_known

    @property
    def num_generated(self) -> int:
        """Output tokens that the host knows."""
        return self.num_known - self.num_prompt

    @property
    def max_new_tokens(self) -> int:
        """Output tokens that it may have in total."""
        return self.max_length - self.num_prompt

    def reusable_tokens(self) -> Int32:
        """Return the tokens whose KV may come from a cache.

        These are all but the last, because its logits are needed; or those before the first one whose logits are needed
        for a log probability, or whose hidden state or experts are needed.
        """
        num = self.num_known - 1
        if self.pool is not None:
            num = min(num, self.pool.num_done)
        if self.num_unscored:
            num = min(num, self.num_prompt - self.num_unscored - 1)
        for rows in (self.experts, self.states):
            if rows is not None:
                num = min(num, rows.num_done)
        return self.cached_ids(0, num)

    def cached_ids(self, start: int, end: int) -> Int32:
        """Return the known tokens at positions [start, end) as the ids under which the cache has their KV."""
        tokens = self.tokens[start : min(end, self.num_known)]
        if self.images is not None:
            return self.images.marked(tokens, start)
        return tokens if self.activation is None else self.activation.marked(tokens, start)

    def num_scored_in(self, start: int, num_tokens: int) -> int:
        """Return how many of the positions from `start` on the device scores: 0 if no token after them is reported.

        Those that are known already count too, because a step that was launched earlier may make them known, and so do
        those before the first reported token, because the device scores the first positions of a grant.
        """
        end = min(start + num_tokens, self.num_prompt - 1)
        if self.sampling.prompt_logprobs is None or end < self.sampling.prompt_logprobs_start:
            return 0
        return max(0, end - start)

    def num_promised_at(self, end: int) -> int:
        """Return the tokens that a grant without drafts promises if it computes the positions before `end`: 1 or 0."""
        return int(end == self.num_known + self.num_unseen and self.pool is None)

    def prefix(self, num_tokens: int) -> bytes:
        """Return its first tokens as bytes; with a key, a hash of both stands for the first token.

        So requests of different keys have no first token in common, and those of one key have it in common only if it
        is the same.
        """
        tokens = self.cached_ids(0, num_tokens).tobytes()
        if self.key is None or not tokens:
            return tokens
        first, rest = tokens[:_TOKEN_BYTES], tokens[_TOKEN_BYTES:]
        return blake2b(first + repr(self.key).encode(), digest_size=_TOKEN_BYTES).digest() + rest

    def window(self, start: int, end: int) -> bytes:
        """Return the known tokens at positions [start, end) as bytes."""
        return self.cached_ids(start, end).tobytes()

    def num_shared(self, other: Request) -> int:
        """Return how many leading tokens are the same in both requests; 0 if their keys differ."""
        if self.key != other.key:
            return 0
        num_both = min(self.num_known, other.num_known)
        differs = self.cached_ids(0, num_both) != other.cached_ids(0, num_both)
        first = int(differs.argmax()) if num_both else 0
        return first if num_both and differs[first] else num_both


# Policies read it for every running request in a step, and the property takes four times as long as its slot.
setattr(Request, "num_tokens", vars(Request)["num_known"])  # noqa: B010
