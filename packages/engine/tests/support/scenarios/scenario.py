"""What a scenario says: the traffic, the configuration, and what goes wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pagewood.engine.api import (
    EngineConfig,
    PoolingParams,
    SamplingParams,
)
from pagewood.engine.weight_commands import OldKV, SleepTag
from scenarios.faulty import Fault

VOCAB_SIZE = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request of a scenario, with the steps at which it arrives and may be aborted."""

    at_step: int
    abort_at_step: int | None
    prompt: tuple[int, ...]
    sampling: SamplingParams
    priority: int
    namespace: str | None
    priority_from_step: tuple[int, int] | None = None
    """A new priority, and the step at which it is set."""
    pooling: PoolingParams | None = None
    """The vector that it asks for, instead of tokens."""
    hold: tuple[int, int, bool] | None = None
    """Steps at which it is paused alone and resumed, and whether it gives its memory back."""
    retain_s: float | None = None
    """See `Submit.retain_s`; the clock of a scenario counts steps."""
    adapter: str | None = None
    """The name of its adapter, which must be in `Scenario.adapters`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterLoad:
    """An adapter that is loaded or unloaded."""

    at_step: int
    """The step before which its folder is named."""
    until_step: int
    """The step in which it has been read; later requests get it."""
    name: str
    content: int
    """What it is made of, > 0; 0: the adapter of that name is unloaded."""
    invocation: tuple[int, ...] = ()
    """Tokens from whose last occurrence in a prompt on it computes; empty: it computes all positions."""
    is_pinned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """An update of the weights."""

    at_step: int
    """The step before which it is asked for."""
    until_step: int
    """The step in which it has been read."""
    content: int
    """What the model is made of then, > 0."""
    old_kv: OldKV


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Traffic, and the configuration and limits of the engine."""

    config: EngineConfig
    num_pages: int
    max_length: int
    arrivals: tuple[Arrival, ...]
    eager_steps: frozenset[int]
    """After these steps the runner computes everything launched; otherwise it computes as late as possible."""
    pauses: tuple[tuple[int, int, bool], ...] = ()
    """Steps before which the engine is paused and resumed, and whether the running requests leave."""
    deadline_after_s: float = 30.0
    """Time from the arrival to the deadline of every second request, in steps."""
    retains: tuple[tuple[int, int, float], ...] = ()
    """Steps before which a part of a prompt is retained or dropped, the index of its arrival, and the seconds."""
    abort_all_at: int | None = None
    """The step before which the engine is paused and all requests are aborted; it is resumed two steps later."""
    long_step_tokens: int = 0
    """Tokens of a step that is retired before the next one is launched; 0: no step is."""
    windows: tuple[int | None, ...] = (None,)
    """The window of each group of layers; read by the runner that `run_scenario` makes."""
    num_states: int = 0
    """Places of states, as if layers were recurrent; 0: there are none. Then nothing is drafted, and weights stay."""
    state_interval: int = 0
    """See `EngineInfo.state_interval`."""
    is_encoded: bool = False
    """Whether batches and results pass between engine and runner as bytes."""
    num_ranks: int = 1
    """Runners that compute every step, each in a thread of its own, as if they were ranks of a model. With several, the
    scenario has no faults, and no drafts beside grammars."""
    num_pools: int = 1
    """Ranks among which pages are divided by request."""
    adapters: tuple[AdapterLoad, ...] = ()
    """Loads and unloads, one of each name at a time."""
    updates: tuple[Update, ...] = ()
    """Updates of the weights, one after the other; requests then have no grammars, vectors, windows and adapters."""
    naps: tuple[tuple[int, int, SleepTag], ...] = ()
    """(step before which memory falls asleep, step before which it wakes, kind of memory); only in scenarios with
    updates, and not while one is read."""
    max_drafts: int = 0
    """The most draft tokens of a request in one step; 0: the engine does not speculate."""
    guess_quality: float = 0.5
    """Probability that a draft token is right; only for the runner that `run_scenario` makes."""
    leaves_out: bool = False
    """Whether the runner leaves out rows that have ended; only for the runner that `run_scenario` makes."""
    faults: Mapping[int, Fault] = field(default_factory=dict[int, Fault])
    """Faults of the runner, by number of the launch; only for the runner that `run_scenario` makes."""
