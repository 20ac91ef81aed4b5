"""The division of a device's memory, and the largest steps that it must have room for."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from pagewood.engine.api import SAMPLING_PARAMETERS, EngineConfig, SamplingParams
from pagewood.engine.assembly.host_pages import TYPICAL_LENGTH
from pagewood.engine.assembly.state_sizes import StateSizes, described_states, state_sizes
from pagewood.engine.core.loop import Runner
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.core.messages.sampling_table import SamplingArrays
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.decoder import Decoder
from pagewood.engine.models.parts.choice import AnyMixer, paged_part, recurrent_part
from pagewood.engine.runner.cuda.rank_store import RankStore

_log = logging.getLogger(__name__)

MIB = 1 << 20
_WRAPPER_BYTES = 8 << 20  # integer workspace of each FlashInfer wrapper on the device
_GRAPH_BYTES = 4 << 20  # driver memory for each captured graph


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The division of a device's memory, in bytes."""

    free_bytes: int
    """Free memory before anything was loaded."""
    mem_fraction: float
    weight_bytes: int
    activation_bytes: int
    graph_bytes: int
    page_bytes: int
    state_bytes: int = 0
    """Memory that the states of recurrent layers take."""

    @property
    def left_bytes(self) -> int:
        """What is left for KV memory; negative: it lacks that much."""
        return int(self.free_bytes * self.mem_fraction) - self._taken_bytes

    @property
    def _taken_bytes(self) -> int:
        return self.weight_bytes + self.activation_bytes + self.graph_bytes + self.state_bytes

    def with_states(
        self, config: EngineConfig, model: Decoder[Tensor], store: RankStore | None
    ) -> tuple[StateSizes, Budget]:
        """Return how many states have a place, the same number on all ranks of a `store`, and what leaves them room.

        One more place is the runner's own. Pages take the rest.

        Raises:
            RunnerLostError: the group of ranks has ended.
            ValueError: see `state_sizes`.
        """
        own = model.config.states  # None: this stage has no recurrent layer
        size = 0 if own is None else own.bytes_per_page
        available = max(0, self.left_bytes - size)
        sizes = state_sizes(config, model.whole, page_bytes=self.page_bytes, state_bytes=size, available=available)
        if store is not None and model.whole.states is not None:
            num_places = min(store.numbers("places of states", sizes.num_places))
            sizes = StateSizes(num_places=num_places, interval=max(store.numbers("interval of states", sizes.interval)))
        if own is not None:
            _log.info(described_states(sizes, config, own))
        return sizes, replace(self, state_bytes=(sizes.num_places + 1) * size)

    def num_pages(self, config: EngineConfig, *, longest: int | None = None) -> int:
        """Return the number of pages of KV memory: as configured, or all that fit besides the runner's own page.

        With the `longest` request of a model whose pages index tokens only, these are not more than are of use.

        Raises:
            ValueError: too few fit.
        """
        taken, left = self._taken_bytes, self.left_bytes
        fitting = max(left, 0) // self.page_bytes - 1
        needed = -(-2 // config.page_size)
        if config.max_total_tokens is not None:
            needed = max(config.max_total_tokens // config.page_size, needed)
        if fitting < needed:
            missing = (needed + 1) * self.page_bytes - left
            share = (taken + (needed + 1) * self.page_bytes) / self.free_bytes
            change = f"raise mem_fraction to {share:.2f} or " if share <= 1 else ""
            raise ValueError(
                f"KV memory of {needed} pages lacks {-(-missing // MIB)} MiB, {self}: {change}lower max_total_tokens, "
                "chunked_prefill_size or max_running, or free memory on the device"
            )
        if longest is not None:
            fitting = min(fitting, -(-max(longest, config.num_rows * TYPICAL_LENGTH) // config.page_size))
        return fitting if config.max_total_tokens is None else needed

    def __str__(self) -> str:
        """Return the budget in words."""
        return (
            f"of {self.free_bytes / MIB:.0f} MiB free, mem_fraction {self.mem_fraction} allows "
            f"{self.free_bytes * self.mem_fraction / MIB:.0f}; weights {self.weight_bytes / MIB:.0f}, "
            f"activations {self.activation_bytes / MIB:.0f}, graphs {self.graph_bytes / MIB:.0f}"
            + f", states {self.state_bytes / MIB:.0f}"
            * (self.state_bytes > 0)
        )


def compute_largest_steps(config: EngineConfig, batch: Batch, runner: Runner, *, verifies: bool) -> None:
    """Compute `largest_batch`, and behind it a step that verifies drafts, if any may.

    Raises:
        ValueError: a step does not fit into the device's memory.
    """
    try:
        runner.launch(batch).wait()
        if verifies:
            runner.launch(largest_verification(config, batch)).wait()
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"a step of {batch.num_tokens} tokens must fit into device memory beside the weights: "
            f"lower chunked_prefill_size, now {config.max_chunk_tokens}, by half"
        ) from error


def largest_verification(config: EngineConfig, batch: Batch) -> Batch:
    """Return a step after `batch` that verifies as many drafts as possible in every row."""
    count = min(1 + config.speculative_num_tokens, int(batch.counts.min()))
    empty = np.empty(0, np.int32)
    return replace(
        batch,
        page_rows=empty,
        page_columns=empty,
        page_ids=empty,
        counts=np.full_like(batch.counts, count),
        num_promised=np.full_like(batch.num_promised, count),
    )


def largest_batch(config: EngineConfig, longest: int, *, has_states: bool = False) -> Batch:
    """Return a step with the most tokens that a step may have, in which all rows sample with all filters.

    If it `has_states`, all rows leave them in one place: their numbers have no meaning.
    """
    num_rows = config.num_rows
    count = min(-(-(config.max_chunk_tokens + num_rows) // num_rows), longest - 1)
    pages_per_row = -(-count // config.page_size)
    rows = np.arange(num_rows, dtype=np.int32)
    empty = np.empty(0, np.int32)
    every_filter = replace(
        SamplingParams(), **{name: one.on for name, one in SAMPLING_PARAMETERS.items() if one.off is not None}
    )
    return Batch(
        page_rows=np.repeat(rows, pages_per_row),
        page_columns=np.tile(np.arange(pages_per_row, dtype=np.int32), num_rows),
        page_ids=np.arange(num_rows * pages_per_row, dtype=np.int32),
        token_rows=empty,
        token_positions=empty,
        token_ids=empty,
        states=np.array([(-1, 0)] * num_rows * has_states, np.int32).reshape(-1, 2),
        rows=rows,
        starts=np.zeros(num_rows, np.int32),
        counts=np.full(num_rows, count, np.int32),
        sampled=rows.copy(),
        num_promised=np.ones(num_rows, np.int32),
        sampling=SamplingArrays.of([every_filter] * num_rows, [0] * num_rows),
    )


def graph_bytes(
    sizes: Sequence[int], model: ModelConfig, *, page_size: int, dtype: str, longest: int, width: int, num_ranks: int
) -> int:
    """Return the memory of the graphs; they share the activations of the largest one.

    Args:
        sizes: grants of the graphs.
        model: the model that they compute.
        page_size: tokens of a page.
        dtype: of activations.
        longest: longest sequence.
        width: tokens per grant in a step that verifies; each size then has a second graph. 0: no step verifies.
        num_ranks: whose tokens' logits a graph computes, with as many tokens each.
    """
    if not sizes:
        return 0
    item_bytes = getattr(torch, dtype).itemsize
    largest, num_windows = max(sizes), len(set(model.windows))
    num_graphs = len(sizes) * (2 if width else 1)
    wrappers = num_graphs * num_windows * _WRAPPER_BYTES
    logits = (
        num_ranks * (sum(sizes) + 2 * largest * width) * model.vocab_size * item_bytes
    )  # for verification: one, and a copy
    widest = max(width, 1)
    sizes_of_layers = (_mixer_size(layer.mixer) + layer.feed_forward.size for layer in model.layers)
    inputs = 0 if model.inputs is None else model.num_layers * model.inputs.size
    activations = largest * widest * 4 * (model.hidden_size + max(sizes_of_layers) + inputs) * item_bytes
    num_groups = len(model.groups(max_length=longest).windows)
    indices = (1 + bool(width)) * largest * (longest // page_size + 1) * 4 * num_groups
    masks = num_windows * largest * (width * (longest + page_size) // 8 + 1) if width else 0
    return wrappers + logits + activations + indices + masks + num_graphs * _GRAPH_BYTES


def _mixer_size(mixer: AnyMixer) -> int:
    """Return how many numbers of a token a mixer computes with: queries, and what a convolution reads."""
    paged, recurrent = paged_part(mixer), recurrent_part(mixer)
    channels = 0 if recurrent is None else recurrent.state[0].shape[-1]
    return channels + (0 if paged is None else paged.q_size)
