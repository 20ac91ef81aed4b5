"""Models that see images on a CUDA device, without a GPU: FlashInfer's functions in plain torch, on a device that
records waits; against `transformers`, and against the engine on a CPU.

Sums depend on the batch here, so log probabilities have a tolerance where those of a CPU are the same bits.
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from pagewood.engine.api import Image, Pause, Resume
from pagewood.engine.core.images import PromptImages
from pagewood.engine.models.decoder import Decoder
from pagewood.engine.runner.cuda.images import CUDAImages, ShownImages
from pagewood.engine.runner.cuda.runner import CUDARunner
from pagewood.engine.runner.row_images import ImagesOfRows, RowImages
from pagewood.engine.runner.tower_encoder import TowerEncoder
from pictured import IMAGE, KINDS, Pictured, pictured, pictures
from pictured_engine import (
    GREEDY,
    Driven,
    DrivenOnDevice,
    bits,
    check,
    check_drafts,
    conversation,
    drafting,
    drawn,
    same,
    submit,
)
from seeded_faults import Edit, seed_fault

pytestmark = pytest.mark.usefixtures("small_buffers")


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, small_buffers: None) -> Pictured:
    return pictured(request.param)


@pytest.fixture(scope="module", params=["qwen3", "gemma3"])
def one_model(request: pytest.FixtureRequest) -> Pictured:
    """The same, of which one kind is enough."""
    return pictured(request.param)


@pytest.fixture(scope="module")
def driven(model: Pictured) -> Iterator[DrivenOnDevice]:
    found = DrivenOnDevice(model)
    yield found
    found.engine.close()


def test_answers_are_those_of_transformers(model: Pictured, driven: DrivenOnDevice) -> None:
    """With graphs, which steps without images keep, also in the row of an image."""
    for count in (1, 3):
        shown = pictures(count, seed=count)
        tokens, images = conversation(model, shown)
        check(model, tokens, shown, driven.answer(tokens, images))
    text = [*range(3, 40)]
    check(model, text, [], driven.answer(text, []))
    assert driven.device.num_replayed >= 3 * 4


def test_turns_go_on_behind_images(model: Pictured, driven: DrivenOnDevice) -> None:
    """Each turn finds the one before in the cache, and is as a turn that finds nothing, and as on a CPU."""
    shown = pictures(3, seed=9)
    tokens: list[int] = [8, 9, 10]
    images: list[Image] = []
    for turn, picture in enumerate(shown):
        images.append(model.image(picture))
        tokens += [*model.tokens(images[-1]), 20 + turn, 21]
        deltas = driven.answer(tokens, images)
        check(model, tokens, shown[: turn + 1], deltas)
        if turn:
            assert deltas[0].num_cached_tokens >= len(tokens) - len(model.tokens(images[-1])) - 16
        fresh = driven.answer(tokens, images, namespace=f"other {turn}")
        assert fresh[0].num_cached_tokens == 0
        assert same(fresh, deltas)
        tokens += drawn(deltas)


@pytest.mark.parametrize("size", [5, pytest.param(7, marks=pytest.mark.slow), pytest.param(13, marks=pytest.mark.slow)])
def test_chunks_change_nothing(model: Pictured, driven: DrivenOnDevice, size: int) -> None:
    """Also in steps with other prompts, with text, and with requests that decode."""
    chunked = DrivenOnDevice(model, chunked_prefill_size=size, prefix_cache=False, overlap=size != 7)
    try:
        shown = pictures(4, seed=6)
        asked = {str(index): conversation(model, shown[: index + 1]) for index in range(4)}
        asked["text"] = [40, 41, 42], []
        found = chunked.answers([submit(name, *one) for name, one in asked.items()])
        for name, (tokens, images) in asked.items():
            check(model, tokens, shown[: len(images)], found[name])
            assert same(found[name], driven.answer(tokens, images, namespace=name))
    finally:
        chunked.engine.close()


def test_an_image_is_found_by_its_pixels(model: Pictured, driven: DrivenOnDevice) -> None:
    """Texts that differ in their image only, side by side and one after the other; several answers to one share it."""
    one, other = pictures(2, seed=5)
    other = other.resize(one.size)
    images = [model.image(one), model.image(other)]
    prefix, shared = [30, *range(31, 60)], model.tokens(images[0])
    tokens = [*prefix, *shared, 61, 62]
    both = driven.answers([submit(str(n), tokens, [image], namespace="x") for n, image in enumerate(images)])
    first, second = (driven.answer(tokens, [image]) for image in images)
    assert second[0].num_cached_tokens <= len(prefix) + shared.index(IMAGE)
    assert second[0].num_cached_tokens >= len(prefix) - 12
    for picture, deltas, beside in ((one, first, both["0"]), (other, second, both["1"])):
        check(model, tokens, [picture], deltas)
        assert same(beside, deltas)
    encoder: Any = driven.engine._intake._images  # pyright: ignore[reportPrivateUsage]
    num_computed = encoder.num_computed
    sampling = [replace(GREEDY, temperature=1.0, seed=seed) for seed in range(3)]
    forks = [submit(f"fork {n}", tokens, images[:1], sampling=own) for n, own in enumerate(sampling)]
    for deltas in driven.answers(forks).values():
        assert deltas[0].num_cached_tokens >= len(tokens) - 5
    assert encoder.num_computed == num_computed


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("ngram", {}),
        pytest.param("ngram", {"overlap": False}, marks=pytest.mark.slow),
        pytest.param("draft", {}, marks=pytest.mark.slow),
        pytest.param("eagle", {"prefix_cache": False}, marks=pytest.mark.slow),
    ],
)
def test_drafts_change_nothing(model: Pictured, driven: DrivenOnDevice, kind: str, options: dict[str, Any]) -> None:
    """Requests draft behind their images, while others show theirs, and again after they have lost their memory."""
    own = DrivenOnDevice(model, **drafting(model, kind, **options))
    try:
        check_drafts(model, driven, own, is_exact=False, least=40 if kind == "ngram" else 0)
        assert own.device.num_replayed > 10
    finally:
        own.engine.close()


@pytest.mark.slow
def test_answers_are_those_of_a_cpu(one_model: Pictured) -> None:
    """While requests lose their memory, and after the cache has lost it to the host."""
    model = one_model
    num_tokens = 212 if model.kind == "gemma3" else 320  # layers with a window give memory back
    shown = pictures(6, seed=7)
    sampling = replace(GREEDY, max_tokens=100 if model.kind == "gemma3" else 60, logprobs=0)
    asked = [submit(str(i), *conversation(model, shown[i : i + 1]), sampling=sampling) for i in range(6)]
    wide = Driven(model)
    expected = {one.request_id: wide.answers([one])[one.request_id] for one in asked}
    wide.engine.close()
    for options in ({"schedule_conservativeness": 0.01}, {"host_cache_gb": 0.02, "max_running": 2}):
        small = DrivenOnDevice(model, max_total_tokens=num_tokens, **options)
        try:
            found = small.answers(asked)
            assert (small.engine.counters().num_preempted > 0) == ("host_cache_gb" not in options)
            assert all(same(found[name], expected[name]) for name in expected)
            if "host_cache_gb" in options:
                again = small.answers(asked[:1])["0"]
                assert again[0].num_cached_tokens >= len(asked[0].tokens) // 4 - 5
                assert same(again, expected["0"])
        finally:
            small.engine.close()


def test_activations_of_16_bits(model: Pictured) -> None:
    """The tower has the dtype of the model, and its rows get through a step."""
    own = DrivenOnDevice(model, dtype="bfloat16")
    try:
        shown = pictures(1, seed=3)
        tokens, images = conversation(model, shown)
        deltas = own.answer(tokens, images)
        row = model.logprobs(tokens, shown)[-1]
        (first, *_) = bits(deltas)
        assert abs(float(row[first.token]) - first.logprob) < 0.3
    finally:
        own.engine.close()


def test_a_step_of_one_token_of_a_prompt_knows_its_images(model: Pictured, driven: DrivenOnDevice) -> None:
    """All but the last token of an image are found, so that the step looks as one in which requests decode."""
    shown = pictures(1, seed=16)
    images = [model.image(one) for one in shown]
    own = model.tokens(images[0])[:-1]
    tokens = [*range(50, 54 + (1 - len(own)) % 4), *own]
    driven.answer(tokens, images)
    again = driven.answer(tokens, images)
    assert again[0].num_cached_tokens == len(tokens) - 1
    check(model, tokens, shown, again)


def test_requests_that_begin_together_have_their_own_images(model: Pictured, driven: DrivenOnDevice) -> None:
    shown = pictures(3, seed=17)
    asked = {f"together {index}": conversation(model, shown[index : index + 1]) for index in range(3)}
    driven.inbox.put(Pause(request_id="pause"))
    for name, one in asked.items():
        driven.inbox.put(submit(name, *one))
    state: Any = driven.engine._state  # pyright: ignore[reportPrivateUsage]
    while len(state.waiting) < len(asked):
        driven.engine.advance(None)
    driven.outbox.take()
    driven.inbox.put(Resume(request_id="resume"))
    found = driven.answers([], names=asked)
    for (name, (tokens, _)), picture in zip(asked.items(), shown, strict=True):
        check(model, tokens, [picture], found[name])


FAULTS: dict[str, tuple[str, Edit]] = {
    "the images of another request": ("qwen2.5", (ImagesOfRows, "admit", "spans[index].append", "spans[-1].append")),
    "the first part of an image in every chunk": (
        "qwen2.5", (RowImages, "shown", "rows[begin - first : end - first]", "rows[: end - begin]"),
    ),
    "a position further behind an image": (
        "qwen3", (RowImages, "components", "np.int32(self.shift)", "np.int32(self.shift + 1)"),
    ),
    "an image a row lower": (
        "qwen3", (TowerEncoder, "_positions", "position + np.repeat(", "position + 1 + np.repeat("),
    ),
    "text behind an image as without": ("qwen3", (CUDAImages, "on_device", "and images.shifts", "and False")),
    "a shift that outlives its request": (
        "qwen3", (ImagesOfRows, "admit", "shifts[int(row)] = self._ends[row] = 0", "self._ends[row] = 0"),
    ),
    "a step of one token by a graph": (
        "qwen3", (CUDARunner, "_queue_plain", "images is not None and images.is_shown", "False"),
    ),
    "no masks": ("gemma3", (ShownImages, "masks", "if last_seen is None", "if True")),
    "masks by which one token less is seen": ("gemma3", (CUDAImages, "of_step", "= end - 1", "= end - 2")),
    "chunks that cut images": ("gemma3", (PromptImages, "whole", "if not self.see_each_other", "if True")),
    "rows for the layer before": ("qwen3", (ShownImages, "add", "(1 + level)", "level")),
    "rows for the layer behind": (
        "qwen3", (Decoder, "states", "visual.add(residual, index)", "visual.add(residual, 1 - index)"),
    ),
    "embeddings that stay": ("qwen2.5", (ShownImages, "replace", "self._features is not None", "False")),
    "no images beside drafts": ("qwen2.5", (CUDARunner, "_queue_verify", "self._shown(images, on_device)", "None")),
    "drafts beside images by a graph": (
        "qwen3", (CUDARunner, "_queue_verify", " and not (images is not None and images.is_shown)", ""),
    ),
    "no masks of images beside drafts": (
        "gemma3", (CUDARunner, "_queue_verify", "shown.last_seen(where.positions)", "None"),
    ),
    "places of drafts as if all before were accepted": (
        "qwen3", (
            CUDARunner, "_queue_verify", "sources, own_where.positions",
            "sources, own.starts.index_select(0, own.token_grants) + own.token_offsets",
        ),
    ),
    "images that share": ("qwen2.5", (PromptImages, "marked", "if first >= end", "if True")),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("fault", [*FAULTS, "none", "none in Gemma"])
def test_faults_are_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is found without one."""
    kind, edit = FAULTS.get(fault, ("gemma3" if "Gemma" in fault else "qwen3", None))
    model = pictured(kind)
    if edit is not None:
        seed_fault([edit], monkeypatch)

    def check_all() -> None:
        own = DrivenOnDevice(model)
        try:
            test_answers_are_those_of_transformers(model, own)
            test_an_image_is_found_by_its_pixels(model, own)
            test_a_step_of_one_token_of_a_prompt_knows_its_images(model, own)
            test_requests_that_begin_together_have_their_own_images(model, own)
            test_chunks_change_nothing(model, own, 5)
            test_drafts_change_nothing(model, own, "ngram", {})
        finally:
            own.engine.close()

    if edit is None:
        check_all()
        return
    with pytest.raises((AssertionError, IndexError, ValueError)):
        check_all()
