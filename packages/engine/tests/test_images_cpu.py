"""Models that see images, in whole engines, against `transformers`: the towers, positions, chunks and the cache.

What is compared are the log probabilities of the tokens that the engine has drawn, and of the 64 most probable ones in
their places, with those of one pass of the reference over the whole text.
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagewood.engine import LLM
from pagewood.engine.api import Delta, EngineConfig, Image, PoolingParams, SamplingParams
from pagewood.engine.images.cached_ids import cached_ids
from pagewood.engine.observe.cache_events import CacheEvents
from pagewood.engine.offline.arguments import PicturedPrompt
from pagewood.radixcache.events.hashing import block_hashes
from pagewood.radixcache.events.router import router_hash
from pagewood.radixcache.namespaces import CacheKey
from pictured import BEGIN, IMAGE, KINDS, Pictured, pictured, pictures
from pictured_engine import GREEDY, Driven, bits, check, check_drafts, conversation, drafting, drawn, submit

ALSO = ("gemma3", "qwen3")


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest) -> Pictured:
    return pictured(request.param)


@pytest.fixture(scope="module", params=["qwen2.5", *(pytest.param(one, marks=pytest.mark.slow) for one in ALSO)])
def one_model(request: pytest.FixtureRequest) -> Pictured:
    """The same, of which one kind is enough."""
    return pictured(request.param)


@pytest.fixture(scope="module")
def driven(model: Pictured) -> Iterator[Driven]:
    found = Driven(model)
    yield found
    found.engine.close()


@pytest.fixture(scope="module")
def chunked(model: Pictured) -> Iterator[Driven]:
    found = Driven(model, chunked_prefill_size=5, prefix_cache=False)
    yield found
    found.engine.close()


def test_answers_are_those_of_transformers(model: Pictured, driven: Driven) -> None:
    for count in (1, 3):
        shown = pictures(count, seed=count)
        tokens, images = conversation(model, shown)
        check(model, tokens, shown, driven.answer(tokens, images))
    text = [*range(3, 40)]  # in the row of the last one
    check(model, text, [], driven.answer(text, []))


def test_turns_go_on_behind_images(model: Pictured, driven: Driven) -> None:
    """Each turn finds the one before in the cache, also its images, and has the bits of a turn that finds nothing."""
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
        assert bits(fresh) == bits(deltas)
        tokens += drawn(deltas)


def test_chunks_change_no_bit(model: Pictured, driven: Driven, chunked: Driven) -> None:
    shown = pictures(3, seed=4)
    tokens, images = conversation(model, shown)
    whole = driven.answer(tokens, images)
    assert bits(chunked.answer(tokens, images)) == bits(whole)
    check(model, tokens, shown, whole)


def test_two_images_never_share(model: Pictured, driven: Driven) -> None:
    """Texts that differ in their image only; the second request finds at most what lies before the image."""
    one, other = pictures(2, seed=5)
    other = other.resize(one.size)
    images = [model.image(one), model.image(other)]
    prefix, shared = [30, *range(31, 60)], model.tokens(images[0])
    tokens = [*prefix, *shared, 61, 62]
    first, second = (driven.answer(tokens, [image]) for image in images)
    assert second[0].num_cached_tokens <= len(prefix) + shared.index(IMAGE)
    assert second[0].num_cached_tokens >= len(prefix) - 12
    check(model, tokens, [one], first)
    check(model, tokens, [other], second)
    again = driven.answer(tokens, [images[0]])
    assert again[0].num_cached_tokens >= len(tokens) - 5
    assert bits(again) == bits(first)


def test_a_router_knows_pages_with_images_by_the_names_of_events(model: Pictured, driven: Driven) -> None:
    """The names of whole pages, made of a prompt and its images, are those that the cache reports."""
    events = CacheEvents(lambda: driven.engine.prefix_cache)
    one, other = (conversation(model, pictures(2, seed=seed)) for seed in (12, 13))

    def names(tokens: list[int], images: list[Image]) -> list[int]:
        ids = cached_ids(np.array(tokens, np.int32), images, model.recipe)
        return [router_hash(name) for name in block_hashes(ids, 4, CacheKey.of("routed"))]

    driven.answer(*one, namespace="routed")
    read: list[Any] = events.read()
    told = {name for event in read for name in event.get("block_hashes", ())}
    assert told.issuperset(names(*one))
    assert told.isdisjoint(names(*other)[1:])
    with pytest.raises(ValueError, match="prompt must have"):
        names(one[0][:-12], one[1])


def test_requests_in_one_batch_have_their_own_images(model: Pictured, driven: Driven) -> None:
    shown = pictures(4, seed=6)
    asked = {str(index): conversation(model, shown[: index + 1]) for index in range(4)}
    asked["text"] = [40, 41, 42], []
    found = driven.answers([submit(name, *one) for name, one in asked.items()])
    for name, (tokens, images) in asked.items():
        check(model, tokens, shown[: len(images)], found[name])


def test_what_was_preempted_goes_on_with_its_images(one_model: Pictured) -> None:
    """A memory of few pages: requests lose them, and compute their images' tokens again."""
    model = one_model
    num_tokens = 212 if model.kind == "gemma3" else 320  # layers with a window give memory back
    small = Driven(model, schedule_conservativeness=0.01, max_total_tokens=num_tokens)
    wide = Driven(model)
    try:
        shown = pictures(6, seed=7)
        sampling = replace(GREEDY, max_tokens=100, logprobs=2)
        asked = [submit(str(i), *conversation(model, shown[i : i + 1]), sampling=sampling) for i in range(6)]
        found = small.answers(asked)
        assert small.engine.counters().num_preempted > 0
        for one in asked:
            assert bits(found[one.request_id]) == bits(wide.answers([one])[one.request_id])
    finally:
        small.engine.close()
        wide.engine.close()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("ngram", {}),
        pytest.param("ngram", {"overlap": False}, marks=pytest.mark.slow),
        pytest.param("suffix", {}, marks=pytest.mark.slow),
        pytest.param("suffix", {"overlap": False, "num_continuous_decode_steps": 3}, marks=pytest.mark.slow),
        pytest.param("draft", {}, marks=pytest.mark.slow),
        pytest.param("eagle", {"prefix_cache": False}, marks=pytest.mark.slow),
    ],
)
def test_drafts_change_no_bit(model: Pictured, driven: Driven, kind: str, options: dict[str, Any]) -> None:
    """Requests draft behind their images, while others show theirs, and again after they have lost their memory."""
    own = Driven(model, **drafting(model, kind, **options))
    try:
        check_drafts(model, driven, own, is_exact=True, least=0 if kind == "eagle" else 40)
    finally:
        own.engine.close()


def test_pages_behind_images_come_back_from_host_and_disk(one_model: Pictured, tmp_path: Path) -> None:
    """After others have taken the device's memory, and in another engine: those of this image, and of no other."""
    model = one_model
    lower: dict[str, Any] = {"host_cache_gb": 0.02, "disk_cache_path": str(tmp_path), "disk_cache_gb": 0.05}
    picture, *others = pictures(3, seed=14)
    tokens, images = conversation(model, [picture])
    first: list[Delta] = []
    for other in (one.resize(picture.size) for one in others):
        small = Driven(model, max_total_tokens=212, max_running=1, **lower)
        try:
            first = first or small.answer(tokens, images)
            for number in range(4):  # of 159 tokens each
                small.answer([*range(3, 85), *range(3 + number, 80 + number)], [])
            again, swapped = small.answer(tokens, images), small.answer(tokens, [model.image(other)])
            assert again[0].num_cached_tokens >= len(tokens) - 5
            assert bits(again) == bits(first)
            assert swapped[0].num_cached_tokens <= tokens.index(IMAGE)
            check(model, tokens, [other], swapped)
        finally:
            small.engine.close()


def test_what_does_not_fit_is_refused(model: Pictured, driven: Driven) -> None:
    (picture,) = pictures(1)
    image = model.image(picture)
    tokens = [3, *model.tokens(image), 4]
    taller = Image(pixels=image.pixels + bytes(3 * image.width), height=image.height + 1, width=image.width)
    torn = [3, BEGIN, IMAGE, 5, *[IMAGE] * (tokens.count(IMAGE) - 1), 4]
    for prompt, images, options, word in (
        ([*tokens[:-3], 4], [image], {}, "prompt must have"),
        (tokens, [image, image], {}, "prompt must have"),
        (tokens, [Image(pixels=image.pixels[:-1], height=image.height, width=image.width)], {}, "pixels must have"),
        (tokens, [taller], {}, "pixels"),
        (torn, [image], {}, "follow each other"),
        (tokens, [], {}, "prompt must have 0 tokens"),
        (tokens, [image], {"pooling": PoolingParams()}, "pooling must be"),
        (tokens, [image], {"sampling": SamplingParams(prompt_logprobs=0)}, "prompt_logprobs must be"),
    ):
        (delta,) = driven.answer(prompt, images, **options)
        assert delta.refusal is not None
        assert word in delta.refusal.message


def test_an_image_is_computed_once_while_it_is_kept(one_model: Pictured) -> None:
    model = one_model
    shown = pictures(2, seed=8)
    tokens, images = conversation(model, shown[:1])
    for cache_gb, num_computed in ((0.1, 1), (0.0, 2)):
        own = Driven(model, prefix_cache=False, image_cache_gb=cache_gb)
        encoder: Any = own.engine._intake._images  # pyright: ignore[reportPrivateUsage]
        own.answer(tokens, images)
        own.answer(tokens, images)
        assert encoder.num_computed == num_computed
        own.engine.close()


def test_options_that_rule_images_out_are_named() -> None:
    model = pictured("gemma3")
    ruled_out: list[tuple[dict[str, Any], str]] = [
        ({"tensor_parallel_size": 2, "num_threads": 2}, "ranks"),
        ({"pipeline_parallel_size": 2, "num_threads": 2}, "stages"),
    ]
    for options, word in ruled_out:
        with pytest.raises(ValueError, match=word):
            EngineConfig(images="on", **options)
    with pytest.raises(ValueError, match="tokens that a step computes together"):
        Driven(model, chunked_prefill_size=3)
    off = Driven(model, images="off")
    (picture,) = pictures(1)
    image = model.image(picture)
    (delta,) = off.answer(model.tokens(image), [image])
    assert delta.refusal is not None
    assert delta.refusal.code == "images_not_supported"
    assert "images are off" in delta.refusal.message
    off.engine.close()


def test_offline_calls_take_images(one_model: Pictured) -> None:
    model = one_model
    (picture,) = pictures(1, seed=12)
    file = BytesIO()
    picture.save(file, "PNG")
    parts = [{"type": "image", "image": picture}, {"type": "text", "text": " w5 w6"}]
    sampling = replace(GREEDY, max_tokens=4)
    with LLM(str(model.folder), images="on", num_threads=1, max_total_tokens=600, page_size=4) as llm:
        (said,) = llm.chat([{"role": "user", "content": parts}], sampling)
        url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
        other = [{"type": "image_url", "image_url": {"url": url}}, parts[1]]
        assert llm.chat([{"role": "user", "content": other}], sampling)[0].logprobs == said.logprobs
        text = llm.tokenizer.render_chat([{"role": "user", "content": [{"type": "image"}, parts[1]]}])
        prompt: PicturedPrompt = {"prompt": text, "images": [file.getvalue()]}
        (drawn_,) = llm.generate(prompt, sampling)
        assert drawn_.logprobs == said.logprobs
        assert "".join(llm.stream(prompt, sampling)) == said.text
        image = model.image(picture)
        tokens = [94, *model.tokens(image), 5, 6, 95]
        assert said.num_prompt_tokens == len(tokens)
        expected = model.logprobs([*tokens, *said.tokens], [picture])[len(tokens) - 1 :]
        for row, one in zip(expected, said.logprobs, strict=False):
            assert abs(float(row[one.token]) - one.logprob) < 1e-4
        for wrong, word in (
            ({"prompt": "w3", "images": [picture]}, "once for each of 1 images"),
            ({"prompt": text, "images": [b"nothing"]}, "image 0 of prompts: .*format"),
        ):
            with pytest.raises(ValueError, match=word):
                llm.generate(wrong)  # pyright: ignore[reportArgumentType, reportCallIssue]
        with pytest.raises(ValueError, match="must have no images here"):
            llm.embed(prompt)
