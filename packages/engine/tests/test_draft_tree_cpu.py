"""Trees of drafts on the CPU: they are those of an independent expansion, and the text is that of plain decoding."""

# pyright: basic
# torch and transformers are typed in part only.

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from chi_square import drop_atypical, is_near_the_largest
from pagewood.engine.api import SamplingParams
from pagewood.engine.core.tree_shape import TreeShape
from pagewood.engine.model_folder.folder import FoundDrafter
from pagewood.engine.model_folder.load import load_model
from pagewood.engine.runner.cpu.compiled.layout import Column
from pagewood.engine.runner.cpu.drafts.loaded_drafter import load_drafter
from pagewood.engine.runner.cpu.kernels import warm_up
from pagewood.engine.runner.cpu.program.ops import CPUOps
from pagewood.engine.runner.cpu.runner import CPURunner
from pagewood.engine.runner.splitmix import exponentials, row_keys
from pagewood.kvpool import MultiHeadLayout
from row_driver import DrivenSequence, RowDriver
from scratch import scratch_folder
from stand_ins.tiny_heads import DIM, VOCAB, folders, load, prompts_of
from stand_ins.torch_decoding import SequenceAttention, rotations_at, torch_ops

NUM_PAGES, MAX_LENGTH = 2000, 128
GREEDY, SAMPLED = SamplingParams(temperature=0.0), SamplingParams(temperature=0.8, top_p=0.95)
TYPICAL = SamplingParams(temperature=1.3, typical_p=0.6)
NEAR = SamplingParams(temperature=1.3, top_n_sigma=1.5)
KINDS = ["own", "eagle", "mtp"]


class Bench:
    """A runner with a drafter that makes trees: the target itself, its head, or its layer for several tokens."""

    def __init__(
        self,
        kind: str,
        shape: TreeShape | None,
        sampling: SamplingParams,
        *,
        page_size: int = 4,
        int8: bool = False,
        num_threads: int = 2,
        target_folder: Path | None = None,
    ) -> None:
        target_folder, head_folder = target_folder or folders()[0], folders()[1]
        target = load_model(target_folder, CPUOps())
        found = FoundDrafter(
            kind="draft" if kind == "own" else "eagle", folder=head_folder if kind == "eagle" else target_folder
        )
        loaded = load_drafter(found, target, target_folder)
        layout = MultiHeadLayout(
            num_layers=4, num_kv_heads=2, head_dim=DIM, page_size=page_size, order="HND",
            dtype="int8" if int8 else "float32",
        )  # fmt: skip
        memory = loaded.allocate(layout, NUM_PAGES)
        self.sampling, self.shape = sampling, shape
        self.drafter: Any = None
        self.tags = memory.tags.array(0, "tags").numpy().reshape(-1).view(np.int64)
        maker = loaded.maker(memory, max_tokens=5, tree=shape)

        def make(rows: Any) -> Any:
            self.drafter = maker(rows)
            return self.drafter

        self.runner = CPURunner(
            target, memory.target, warm_up(DIM, int8=int8, draft_head_dim=DIM), max_rows=20,
            max_length=MAX_LENGTH,
            num_threads=num_threads, make_drafter=make if shape else None,
        )  # fmt: skip
        self.driver = RowDriver(self.runner, num_pages=NUM_PAGES, page_size=page_size)

    def prefilled(self, prompts: list[list[int]], *, chunk: int = 7) -> list[DrivenSequence]:
        """Return sequences of which only the last token is not computed."""
        sequences = [self.driver.add(one, sampling=self.sampling, seed=7 + i) for i, one in enumerate(prompts)]
        self.driver.generate(sequences, num_tokens=1, chunk=chunk)
        return sequences

    def step(self, sequences: list[DrivenSequence], nodes: list[int]) -> tuple[list[int], list[Any]]:
        """Compute a step with a tree for each sequence; return the counts, and the tokens and parents of each tree."""
        assert self.shape is not None
        drafts = [(n, self.shape.depth_of(n) if n else 0) for n in nodes]
        batch = self.driver.batch([(one, 1) for one in sequences], drafts=drafts)
        result = self.runner.launch(batch).wait()
        for one, tokens in zip(sequences, result.by_grant(), strict=True):
            one.tokens.extend(tokens)
            one.num_computed = len(one.tokens) - 1
        if result.num_drafted is not None:
            assert result.num_drafted.tolist() == [depth for _, depth in drafts]
        program, one_pass = self.runner._program, self.runner._pass
        verified = program.inputs[0].view(np.int32)[: batch.num_tokens, 0].copy()
        at = program.scopes[one_pass.scope.index, Column.PARENTS] - program.memory.ctypes.data
        parents = program.memory.view(np.int32)[at // 4 :][: batch.num_tokens].copy()
        ends = np.cumsum(batch.counts)[:-1]
        return result.counts.tolist(), list(zip(np.split(verified, ends), np.split(parents, ends), strict=True))


@cache
def plain(num: int, length: int, sampling: SamplingParams, int8: bool) -> list[list[int]]:
    bench = Bench("own", None, sampling, int8=int8)
    sequences = bench.prefilled(prompts_of(num))
    bench.driver.generate(sequences, num_tokens=length, chunk=7)
    bench.runner.close()
    return [one.output for one in sequences]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_the_text_is_that_of_plain_decoding(kind: str, data: st.DataObject) -> None:
    num, length = data.draw(st.integers(1, 6)), 40
    topk = data.draw(st.integers(2, 4))
    shape = TreeShape(data.draw(st.integers(topk, 12)), topk)
    sampling, int8 = data.draw(st.sampled_from([GREEDY, SAMPLED, TYPICAL])), data.draw(st.booleans())
    bench = Bench(
        kind, shape, sampling, int8=int8, page_size=data.draw(st.sampled_from([1, 4, 16])),
        num_threads=data.draw(st.sampled_from([1, 2])),
    )  # fmt: skip
    sequences = bench.prefilled(prompts_of(num))
    while live := [one for one in sequences if len(one.output) < length]:
        few = st.integers(0, shape.num_nodes)
        counts, _ = bench.step(live, [data.draw(st.one_of(few, st.just(shape.num_nodes))) for _ in live])
        assert min(counts) >= 1
    bench.runner.close()
    assert [one.output[:length] for one in sequences] == plain(6, length, sampling, int8)[:num]


@torch.inference_mode()
def logits_after(kind: str, tokens: list[int], path: tuple[int, ...]) -> np.ndarray:
    """Return the logits that the drafter in plain torch has after a text and a path of drafts, over all tokens."""
    target, head = load("eagle" if kind == "own" else kind, torch_ops())
    text = [*tokens, *path] if kind == "own" else tokens[:-1]
    ids, places = torch.tensor(text), list(range(len(text)))
    one, first = torch.tensor([len(places) - 1]), torch.tensor([0])
    attention = SequenceAttention(head_dim=DIM).at(places)
    last, states = target.states(ids, rotations_at(target.ropes, places), attention, one, captured=head.config.captured)
    logits = target.head(last)
    if kind == "own":
        return logits[0].numpy().astype(np.float64)
    pairs, attention = torch.tensor(tokens[1:]), SequenceAttention(head_dim=DIM)
    logits, state = head(pairs, head.features(states), rotations_at(head.ropes, places), attention.at(places), one)
    for position, token in enumerate(path, len(places)):
        rotation = rotations_at(head.ropes, [position])
        logits, state = head(torch.tensor([token]), state, rotation, attention.at([position]), first)
    result = np.full(VOCAB, -np.inf)
    result[slice(None) if head.token_map is None else head.token_map.numpy()] = logits[0].numpy()
    return result


def best_tokens(logits: np.ndarray, topk: int, sampling: SamplingParams, seed: int, position: int) -> list[Any]:
    """Return the best tokens with the logarithms of their probabilities."""
    allowed = np.isfinite(logits)
    numbers = logits.copy()
    if sampling.temperature > 0.0:
        weights = np.exp((logits - logits.max()) / sampling.temperature)
        order = np.argsort(-weights)
        mass = np.cumsum(weights[order]) / weights.sum()
        allowed[order[1:][mass[:-1] >= sampling.top_p]] = False
        if sampling.top_n_sigma:
            allowed &= is_near_the_largest(logits.astype(np.float32), sampling.top_n_sigma)
        if sampling.typical_p < 1:
            drop_atypical(weights, sampling.typical_p)
            allowed &= weights > 0
        keys = row_keys(np.array([seed], np.int64), np.array([position], np.int32))
        noise = exponentials(keys, np.arange(VOCAB, dtype=np.uint32)[None])[0]
        numbers -= sampling.temperature * np.log(noise)
    numbers[~allowed] = -np.inf
    shares = numbers - np.log(np.exp(numbers - numbers.max()).sum()) - numbers.max()
    return [(int(i), shares[i]) for i in np.argsort(-numbers)[:topk] if allowed[i]]


def expected_tree(
    kind: str, tokens: list[int], shape: TreeShape, num_nodes: int, sampling: SamplingParams, seed: int
) -> set[tuple[int, ...]]:
    """Return the paths to all nodes of a tree."""
    beam: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    candidates: list[tuple[tuple[int, ...], float]] = []
    widths = (*shape.widths, 0)
    for depth in range(shape.depth_of(num_nodes)):
        level = [
            ((*path, token), score + share)
            for path, score in beam
            for token, share in best_tokens(
                logits_after(kind, tokens, path), shape.topk, sampling, seed, len(tokens) + depth
            )
        ]
        beam = sorted(level, key=lambda one: -one[1])[: widths[depth]]
        candidates += level
    return {path for path, _ in sorted(candidates, key=lambda one: -one[1])[:num_nodes]}


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, TYPICAL, NEAR], ids=["greedy", "sampled", "typical", "near"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_nodes", "topk"), [(8, 2), (6, 3), (7, 4)])
def test_a_tree_has_the_nodes_of_an_independent_expansion(
    kind: str, sampling: SamplingParams, num_nodes: int, topk: int
) -> None:
    """Also in later steps, after accepted and rejected nodes, and with fewer nodes for some rows."""
    shape = TreeShape(num_nodes, topk)
    bench = Bench(kind, shape, sampling)
    sequences = bench.prefilled(prompts_of(3))
    for nodes in ([num_nodes] * 3, [num_nodes, 3, 1], [num_nodes] * 3):
        expected = [
            expected_tree(kind, one.tokens, shape, n, sampling, 7 + i)
            for i, (one, n) in enumerate(zip(sequences, nodes, strict=True))
        ]
        _, trees = bench.step(sequences, nodes)
        for (tokens, parents), paths in zip(trees, expected, strict=True):
            found: list[tuple[int, ...]] = [()]
            for token, parent in zip(tokens[1:].tolist(), parents[1:].tolist(), strict=True):
                found.append((*found[parent if len(tokens) > 2 else 0], token))
            fillers = {(0,)} if len(paths) < len(tokens) - 1 else set[tuple[int, ...]]()
            assert set(found[1:]) == paths | fillers
    bench.runner.close()


@cache
def certain_folder() -> Path:
    """Return the folder of a target that is sure of every token."""
    source, folder = folders()[0], scratch_folder()
    shutil.copytree(source, folder, dirs_exist_ok=True)
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"] * 100
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, TYPICAL, NEAR], ids=["greedy", "sampled", "typical", "near"])
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_trees_of_an_equal_model_are_accepted_to_their_depth(
    page_size: int, int8: bool, sampling: SamplingParams
) -> None:
    """So the keys of accepted nodes are where the next steps look for them, in both models."""
    shape = TreeShape(8, 2)
    bench = Bench("own", shape, sampling, page_size=page_size, int8=int8, target_folder=certain_folder())
    sequences = bench.prefilled(prompts_of(5))
    for nodes in ([8] * 5, [8, 0, 5, 1, 3], [8] * 5, [0] * 5, [8] * 5):
        counts, _ = bench.step(sequences, nodes)
        assert counts == [1 + shape.depth_of(n) if n else 1 for n in nodes]
    bench.runner.close()


def test_slots_of_a_beam_lose_their_tags() -> None:
    """They hold no text, so a later request with the same text must not find them."""
    bench = Bench("own", TreeShape(8, 2), GREEDY)
    [one] = bench.prefilled(prompts_of(4)[3:])
    end = len(one.tokens)
    while len(one.pages) * 4 < end + 8:
        one.pages.append(bench.driver._free.pop())
    slots = [one.pages[i // 4] * 4 + i % 4 for i in range(end + 8)]
    bench.tags[slots] = 5
    bench.step([one], [8])
    assert not bench.tags[slots[end:]].any()
    assert np.unique(bench.tags[slots[:end]]).size == end
    bench.runner.close()


@pytest.mark.parametrize(("num_nodes", "topk"), [(8, 1), (3, 4)])
def test_shapes_that_are_not_trees_are_refused(num_nodes: int, topk: int) -> None:
    with pytest.raises(ValueError, match=f"topk must be in \\[2, num_nodes\\], got {topk} with {num_nodes} nodes"):
        TreeShape(num_nodes, topk)


def test_a_tree_is_told_from_a_chain_and_its_beams_have_slots() -> None:
    for topk in range(2, 9):
        for num_nodes in range(topk, 65):
            shape = TreeShape(num_nodes, topk)
            for n in range(1, num_nodes + 1):
                depth = shape.depth_of(n)
                assert 1 <= depth <= shape.depth
                assert depth < n or n == 1
                assert sum(shape.widths[: depth - 1]) <= n
            assert shape.depth_of(num_nodes) == shape.depth
            assert list(shape.widths) == sorted(shape.widths, reverse=True)
            assert set(shape.widths) <= set(range(1, topk + 1))
