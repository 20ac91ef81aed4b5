"""The parts of a log: a header, and a record for each turn of the engine's loop in which something happened."""

from __future__ import annotations

from typing import Any

import msgspec

VERSION = 2
"""Version of the format. Logs of another version are refused."""


class Header(msgspec.Struct, frozen=True, kw_only=True, tag="header"):
    """The first frame of a file."""

    version: int = VERSION
    run: str
    """Differs between engines."""
    first: int
    """Number of the first record of this file; more than 0 if older ones are in another file, or were dropped."""
    unix_s: float
    """When the engine was built."""
    clock_s: float
    """The same time on the engine's clock."""
    config: dict[str, Any]
    """Fields of `EngineConfig`, with every value that was chosen."""
    info: dict[str, Any]
    """Fields of `EngineInfo`."""
    max_drafts: int = 0
    """The most draft tokens of a request in one step; 0: the engine does not speculate."""
    drafts_constrained: bool = False
    has_grammars: bool = False
    has_images: bool = False
    has_adapters: bool = False
    weights: tuple[str, str] | None = None
    """Why weights cannot be updated, and why memory cannot be given back; empty: it can. None: neither is possible."""
    has_tiers: bool = False
    """Whether the prefix cache has lower tiers, so that its answers are in the log."""
    has_tokens: bool = False
    """Whether tokens and namespaces are the real ones."""


class Result(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The result of a wait for a step, as far as decisions depend on it."""

    tokens: bytes = b""
    """int32, little-endian, renamed like those of prompts."""
    counts: bytes | None = None
    """int32, little-endian: number of tokens of each sampled grant; None: one each."""
    excluded: tuple[int, ...] = ()
    num_scored: int = -1
    """Prompt tokens with log probabilities; -1: there are none."""
    pooled: tuple[bool, ...] = ()
    """Whether each sum of hidden states consists of numbers."""
    fault: str = ""
    """error: the step failed; interrupt: the wait was interrupted; empty: neither."""


class Plan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A plan, and the numbers that it ended with."""

    grants: tuple[int, ...] | None = None
    """For each grant, the request's arrival, its start, tokens, promised tokens, and 1 if it was admitted. None: the
    grants of the plan before, each one position later."""
    num_preempted: int = 0
    num_waiting: int
    num_running: int
    num_free_pages: int


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="turn"):
    """A turn of the loop: inputs first, then decisions."""

    number: int
    commands: tuple[tuple[str, dict[str, Any]], ...] = ()
    clock: tuple[float, ...] = ()
    """Readings, in their order."""
    ends: tuple[tuple[int, dict[str, Any]], ...] = ()
    """Work beside the steps that had ended: its number, in the order in which grammars, images, adapters and weights
    were begun, and what decisions depend on of the result; of a refusal, `code` and `param`."""
    towers: tuple[int, ...] = ()
    """Readings of the version of the tower that encodes images, in their order."""
    exchanges: tuple[bool, ...] = ()
    """Whether weights that were read could be computed with; empty: all could."""
    matchers: tuple[tuple[int, int, str, Any], ...] = ()
    """Unusual answers of matchers: grammar, tokens before, method, answer."""
    drafts: tuple[list[int] | None, ...] = ()
    """Draft lengths by decision; None: it rested."""
    cache: dict[str, list[Any]] = {}
    """Answers of a prefix cache with lower tiers, by method."""
    launches: tuple[str, ...] = ()
    """For each launch: error, interrupt or nothing; empty if all is well."""
    results: tuple[Result, ...] = ()

    plans: tuple[Plan, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()
    """Ids of requests that were refused, with the codes."""
    notes: tuple[tuple[int, ...], ...] = ()
    """Reason, arrival (0: all waiting requests), arrival of the other request (0: none), numbers. For a lasting state,
    only the first note is kept. Reason 0: the queue was examined to its end."""
    versions: tuple[tuple[float, str], ...] = ()
    """When tokens were the first that other weights had computed than those before, and the name of these; empty: those
    that the engine began with. A file begins with their name."""
    adapters: tuple[tuple[int, str, str], ...] = ()
    """For each admitted request that has one: its arrival, and name and version of its adapter."""

    names: tuple[tuple[int, str], ...] = ()
    """Arrivals that are mentioned for the first time in this file, with the ids of their requests."""
    misses: tuple[tuple[Any, ...], ...] = ()
    """For each admitted request, its arrival and the fields of `CachedPrefix`."""
    events: tuple[tuple[float, str, str, str, int], ...] = ()
    """First tokens and ends of requests: time, id, first or the reason of the end, code of a refusal, output tokens."""

    @property
    def decisions(self) -> bytes:
        """The data that must be the same in a replay."""
        versions = [name for _, name in self.versions]
        return msgspec.msgpack.encode((self.plans, self.refused, self.notes, versions, self.adapters))


ENCODER = msgspec.msgpack.Encoder()
DECODER: msgspec.msgpack.Decoder[Header | Record] = msgspec.msgpack.Decoder(Header | Record)
