"""Drafts of ranks on CUDA devices without a GPU: each drafts with its part, and all verify the same."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed

from asked_twice import PROMPTS as ASKED
from cuda_ranks import answered, drafted, small, use_stand_ins
from group_in_threads import ranks_are_threads
from noted_drafts import check_alike, drafts_noted
from pagewood.engine.api import Grammar, SamplingParams
from pagewood.engine.core.loop import RunnerLostError
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.core.messages.sampling_table import SamplingArrays
from pagewood.engine.model_folder.folder import model_folder
from pagewood.engine.offline.llm import LLM
from pagewood.engine.runner.cuda.division import DividedGrants
from pagewood.engine.runner.cuda.drafts.ahead import HeldDrafts
from pagewood.engine.runner.cuda.drafts.drafting_head import EagleDrafter
from pagewood.engine.runner.cuda.drafts.verify import DraftRequest, InexactRows
from pagewood.engine.runner.cuda.drafts.verify_arrays import verify_step
from pagewood.engine.runner.cuda.drafts.verify_part import VerifyPart
from pagewood.engine.runner.cuda.runner import CUDARunner
from pagewood.engine.runner.cuda.step_arrays import TableShape
from ranked_engines import PROMPTS, mixed_sampling
from seeded_faults import Edit, seed_fault, slow_ones
from stand_ins import tiny_heads
from stand_ins.nccl_gloo import NCCLGroup
from stand_ins.recording_device import RecordingDevice

KINDS = ("ngram", "draft", "eagle", "mtp", "experts")


def drafting(kind: str) -> dict[str, Any]:
    """Return the options of an engine that drafts in each step."""
    options: dict[str, Any] = {"speculative": kind, "speculative_control": "fixed", "speculative_num_tokens": 3}
    if kind in ("eagle", "mtp", "experts", "latents"):
        target, head = tiny_heads.folders_of(kind)
        options |= {"model": str(target), "speculative": "eagle"}
        return options | ({"speculative_model": str(head)} if kind == "eagle" else {})
    return (
        options
        | {"model": str(model_folder(None))}
        | ({"speculative_model": str(model_folder(None))} if kind == "draft" else {})
    )


@pytest.mark.parametrize(
    "kind", [kind if kind == "eagle" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_drafts_of_ranks_do_not_change_the_tokens(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_stand_ins(monkeypatch)
    ranks_are_threads(monkeypatch)
    options = drafting(kind)
    plain = {"speculative": "off", "speculative_model": None}
    expected = answered(small(Path(), **{**options, **plain, "speculative_control": "adaptive"}), vocab_size=50)
    for control in ("fixed", "adaptive"):
        config = small(Path(), **{**options, "speculative_control": control}, tensor_parallel_size=2)
        assert answered(config, vocab_size=50) == expected


STAGES: dict[str, Any] = {"pipeline_parallel_size": 2}
BOTH: dict[str, Any] = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}
BY_REQUEST: dict[str, Any] = {"tensor_parallel_size": 2, "enable_dp_attention": True}


def plain(options: dict[str, Any]) -> dict[str, Any]:
    """Return the same options without drafts."""
    return {**options, "speculative": "off", "speculative_model": None, "speculative_control": "adaptive"}


@pytest.mark.parametrize("options", [STAGES, BY_REQUEST], ids=["stages", "by request"])
def test_drafts_of_a_head_that_knows_the_text_are_accepted(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_stand_ins(monkeypatch)
    ranks_are_threads(monkeypatch)
    drafts = drafting("eagle")
    expected = answered(small(Path(), **plain(drafts)), vocab_size=50)
    texts = [[token % 50 for token in prompt] + answer for prompt, answer in zip(ASKED * 2, expected, strict=True)]

    def draft(own: Any, request: DraftRequest, real: Any = EagleDrafter.draft) -> tuple[torch.Tensor, torch.Tensor]:
        found, nums = real(own, request)
        for row, length, one in zip(request.rows, request.lengths.tolist(), found, strict=True):
            known = request.tokens[row, :length].tolist()
            after = next((text[length:] for text in texts if text[:length] == known), [])[: len(one)]
            one[: len(after)] = torch.tensor(after, dtype=torch.int32)
        return found, nums

    monkeypatch.setattr(EagleDrafter, "draft", draft)
    found, counts = drafted(small(Path(), **drafts, **options), vocab_size=50)
    assert found == expected
    assert counts is not None
    assert counts.num_accepted > 20


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle", *(pytest.param(one, marks=pytest.mark.slow)
                                             for one in ("draft", "mtp", "experts", "latents"))])  # fmt: skip
def test_drafts_go_with_stages(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft model is in each stage; a head is in the last one, and drafts at the end of a step for the next one."""
    use_stand_ins(monkeypatch)
    ranks_are_threads(monkeypatch)
    options = drafting(kind)
    expected = answered(small(Path(), **plain(options)), vocab_size=50)
    notes = drafts_noted(monkeypatch)
    assert answered(small(Path(), **options), vocab_size=50) == expected
    alone = notes.copy()
    notes.clear()
    found, counts = drafted(small(Path(), **options, **STAGES), vocab_size=50)
    assert found == expected
    assert counts is not None
    assert counts.num_drafted > 0
    check_alike(notes, alone)
    for others in ({**BOTH}, {**STAGES, "overlap": True}, {**STAGES, "speculative_control": "adaptive"}):
        assert answered(small(Path(), **{**options, **others}), vocab_size=50) == expected


@pytest.mark.parametrize("kind", ["draft", *(pytest.param(one, marks=pytest.mark.slow)
                                             for one in ("ngram", "eagle", "mtp", "experts", "latents"))])  # fmt: skip
def test_drafts_go_with_attention_by_request(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafts behind a text are those of one process."""
    use_stand_ins(monkeypatch)
    ranks_are_threads(monkeypatch)
    options = drafting(kind)
    expected = answered(small(Path(), **plain(options)), vocab_size=50)
    notes = drafts_noted(monkeypatch)
    assert answered(small(Path(), **options), vocab_size=50) == expected
    alone = notes.copy()
    notes.clear()
    found, counts = drafted(small(Path(), **options, **BY_REQUEST), vocab_size=50)
    assert found == expected
    assert counts is not None
    assert counts.num_drafted > 0
    check_alike(notes, alone)
    if kind == "draft":
        return
    for others in ({"overlap": False}, {"speculative_control": "adaptive"}):
        assert answered(small(Path(), **{**options, **BY_REQUEST, **others}), vocab_size=50) == expected


@pytest.mark.slow
@pytest.mark.parametrize("options", [STAGES, BY_REQUEST], ids=["stages", "by request"])
def test_drafts_go_with_devices_of_their_own(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps without drafts are in graphs, which a head follows."""
    use_stand_ins(monkeypatch)
    ranks_are_threads(monkeypatch)
    monkeypatch.setattr(distributed, "ProcessGroupNCCL", NCCLGroup, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    drafts = {**drafting("eagle"), "speculative_control": "adaptive"}
    expected = answered(small(Path(), **plain(drafts)), vocab_size=50)
    device = RecordingDevice()
    assert answered(small(Path(), **drafts, **options), device=device, vocab_size=50) == expected
    assert device.num_replayed > 0


@pytest.mark.slow
@pytest.mark.parametrize("options", [STAGES, BY_REQUEST], ids=["stages", "by request"])
@pytest.mark.parametrize("kind", ["draft", "mtp"])
def test_drafts_of_processes_go_with_grammars(
    kind: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_stand_ins(monkeypatch)
    bound = SamplingParams(max_tokens=20, temperature=0.0, grammar=Grammar(kind="regex", text="[ab ]{60}"))
    whole: dict[str, Any] = {"device": "cuda", "dtype": "float16", "max_running": 4, "max_total_tokens": 1024}
    whole |= {**drafting("draft"), "speculative": "draft" if kind == "draft" else "eagle"}
    whole |= {} if kind == "draft" else {"speculative_model": None}
    found: list[list[Any]] = []
    for own in (plain(whole), {**whole, **options}):
        with LLM(**own) as llm:
            answers = llm.generate(PROMPTS * 2, [*mixed_sampling(4), *[bound] * 4])
            found.append([one.tokens for one in answers])
    assert found[0] == found[1]


def test_drafts_are_held_for_one_place_of_one_request() -> None:
    held = HeldDrafts(3)
    rows, ends = np.array([2, 0], np.int32), np.array([5, 6], np.int32)
    where, drafts = held.hold(rows, ends, np.array([[8, 9, 3, -1], [8, -1, -1, -1]], np.int32))
    assert where.tolist() == [[2, 5], [2, 6], [2, 7], [0, 6]]
    assert drafts.tolist() == [8, 9, 3, 8]

    def limits(starts: list[int], most: int, **others: Any) -> list[int]:
        empty, ones = np.empty(0, np.int32), np.ones(2, np.int32)
        batch = Batch(
            page_rows=empty, page_columns=empty, page_ids=empty, token_rows=empty, token_positions=empty,
            token_ids=empty, rows=rows, starts=np.array(starts, np.int32), counts=ones * (1 + most),
            sampled=np.arange(2, dtype=np.int32), num_promised=ones * (1 + most),
            sampling=SamplingArrays.of([SamplingParams()] * 2, [0, 0]), **others,
        )  # fmt: skip
        held.note(batch)
        shape = TableShape(max_rows=3, tokens_per_row=20, pages_per_row=5, page_size=4)
        step = verify_step(batch, shape, is_inexact=np.zeros(2, np.bool_))
        return held.limited(batch, step).arrays.most_drafts.tolist()

    assert limits([4, 6], 4) == [3, 0]  # row 0 has got a token since
    assert limits([4, 5], 2) == [2, 1]
    assert limits([4, 5], 4, admitted=np.zeros(1, np.int32)) == [0, 1]


def test_a_stage_that_holds_other_drafts_ends_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    use_stand_ins(monkeypatch)
    ranks_are_threads(monkeypatch)
    edit: Edit = (CUDARunner, "learn", "where[:, 1], drafts))", "where[:, 1], drafts ^ np.int32(self._is_last)))")
    seed_fault([edit], monkeypatch)
    message = "rank 1 has (other tokens or drafts than rank 0 in step|received other hidden states)"
    with pytest.raises(RunnerLostError, match=message):
        answered(small(Path(), **drafting("eagle"), **STAGES), vocab_size=50)


FAULTS: dict[str, tuple[str, Edit]] = {
    "states of other verified positions": (
        "ngram", (VerifyPart, "words", '"gathered": self.gathered', '"gathered": self.gathered[::-1].copy()')
    ),
    "rows begin where the host thinks": (
        "ngram", (CUDARunner, "_part", "self._inexact.of(own.batch)", "self._inexact.of(own.batch) & False")
    ),
}  # fmt: skip
OF_DRAFTS: dict[str, tuple[str, dict[str, Any], Edit]] = {
    "drafts of other rows": (
        "draft", BY_REQUEST,
        (DividedGrants, "words", '"gathered": self.gathered', '"gathered": self.gathered[::-1].copy()'),
    ),
    "a head keeps states of other rows": (
        "eagle", BY_REQUEST, (CUDARunner, "_extend_plain", 'extra["own_sampled"]', 'extra["own_sampled"].flip(0)')
    ),
    "a head reads other tokens": (
        "eagle", BY_REQUEST, (CUDARunner, "_extend_plain", "step.sources + 1", "step.sources")
    ),
    "a head drafts for the position before": (
        "eagle", STAGES, (CUDARunner, "_queue_plain", "step.drawn_positions + 1", "step.drawn_positions")
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", slow_ones(FAULTS, *list(FAULTS)[1:]))
def test_a_verification_by_request_that_is_wrong_changes_the_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_stand_ins(monkeypatch)
    ranks_are_threads(monkeypatch)
    kind, edit = FAULTS[name]
    options = drafting(kind)
    expected = answered(small(Path(), **plain(options)), vocab_size=50)
    seed_fault([edit], monkeypatch)
    assert answered(small(Path(), **options, **BY_REQUEST), vocab_size=50) != expected


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_DRAFTS)
def test_drafts_that_are_wrong_are_other_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_stand_ins(monkeypatch)
    ranks_are_threads(monkeypatch)
    kind, ranked, edit = OF_DRAFTS[name]
    options, notes = drafting(kind), drafts_noted(monkeypatch)
    answered(small(Path(), **options), vocab_size=50)
    alone = notes.copy()
    notes.clear()
    seed_fault([edit], monkeypatch)
    answered(small(Path(), **options, **ranked), vocab_size=50)
    with pytest.raises(AssertionError, match="other drafts"):
        check_alike(notes, alone)


@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_drafts_are_verified_in_graphs_of_ranks(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    use_stand_ins(monkeypatch)
    ranks_are_threads(monkeypatch)
    monkeypatch.setattr(distributed, "ProcessGroupNCCL", NCCLGroup, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    config = small(Path(), **drafting("eagle"), overlap=overlap)
    device = RecordingDevice()
    expected = answered(config, vocab_size=50)
    ranked = replace(config, tensor_parallel_size=2)
    assert answered(ranked, device=device, vocab_size=50) == expected
    assert device.num_replayed > 0


@pytest.mark.slow
def test_drafts_of_processes_with_grammars_and_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks wait for their steps at times of their own."""
    use_stand_ins(monkeypatch)
    bound = SamplingParams(max_tokens=20, temperature=0.0, grammar=Grammar(kind="regex", text="[ab ]{60}"))
    found: list[list[Any]] = []
    options: dict[str, Any] = {
        "device": "cuda", "dtype": "float16", "max_running": 4, "max_total_tokens": 1024, "speculative": "ngram",
        "speculative_control": "fixed",
    }  # fmt: skip
    for count, num_steps in ((1, 1), (2, 1), (2, 3)):
        with LLM(**options, tensor_parallel_size=count, num_continuous_decode_steps=num_steps) as llm:
            answers = llm.generate(PROMPTS * 2, [*mixed_sampling(4), *[bound] * 4])
            found.append([one.tokens for one in answers])
            counts = llm.counters().speculation
            assert counts is not None
            assert counts.num_accepted > 0
    assert found[0] == found[1] == found[2]


@pytest.mark.slow
def test_a_rank_that_drafts_with_another_seed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    use_stand_ins(monkeypatch, fault="other seed")
    options: dict[str, Any] = {
        "device": "cuda", "dtype": "float16", "max_running": 4, "max_total_tokens": 1024, "tensor_parallel_size": 2,
        "speculative": "ngram", "speculative_control": "fixed",
    }  # fmt: skip
    with LLM(**options) as llm, pytest.raises(RunnerLostError, match="rank 1 has other tokens"):
        llm.generate(PROMPTS, SamplingParams(max_tokens=40, temperature=1.0, ignore_eos=True))


def test_a_rank_that_treats_its_rows_as_exact_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all ranks alike, so that the tokens are wrong, and not only the group ended."""
    use_stand_ins(monkeypatch)
    ranks_are_threads(monkeypatch)
    options = drafting("ngram")
    expected = answered(small(Path(), **options))
    edit: Edit = (InexactRows, "of", "self._num_launched - self._num_in_flight", "self._num_launched")
    seed_fault([edit], monkeypatch)
    assert answered(small(Path(), **options, tensor_parallel_size=2)) != expected
