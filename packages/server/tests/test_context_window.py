"""Where the length of a prompt is known: an answer is capped, a text is cut, or the request is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers.processors import TemplateProcessing

from pagewood.engine.api import Overflow, PoolingParams, Refuse, RequestOptions, SamplingParams, Submit
from pagewood.engine.text import Tokenizer
from pagewood.server.messages import wire
from pagewood.server.stages.tokenizing import commands

TEXT = wire.TextPrompt(text="a prompt of 24 characters")
BEGIN, END = 256, 257
"""Ids of the two special tokens."""


def generate(
    prompt: wire.Prompt,
    *,
    max_tokens: int | None,
    max_length: int,
    min_tokens: int = 0,
    pooling: PoolingParams | None = None,
    **more: Any,
) -> wire.Generate:
    options = RequestOptions(sampling=SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens), pooling=pooling)
    return wire.Generate(request_id="a", prompt=prompt, options=options, max_length=max_length, **more)


@pytest.mark.parametrize("max_tokens", [3, 4, 5, 128_000, None])
@pytest.mark.parametrize("siblings", [(), ("b", "c")])
def test_an_answer_is_capped_where_the_window_is_to_be_filled(
    tokenizer: Tokenizer, max_tokens: int | None, siblings: tuple[str, ...]
) -> None:
    num_prompt = len(tokenizer.encode(TEXT.text))
    tokens = tokenizer.encode(TEXT.text).astype("<i4").tobytes()
    for prompt in (TEXT, wire.TokenPrompt(tokens=tokens)):
        message = generate(
            prompt, max_tokens=max_tokens, max_length=num_prompt + 4, fills_window=True, sibling_ids=siblings
        )
        found = commands(tokenizer, message)
        assert len(found) == 1 + len(siblings)
        fits = max_tokens is not None and max_tokens <= 4
        for one in found:
            assert isinstance(one, Submit)
            assert one.sampling.max_tokens == (max_tokens if fits else None)  # None: what the engine has room for


def test_a_text_far_too_long_is_refused_although_the_window_is_to_be_filled(tokenizer: Tokenizer) -> None:
    prompt = wire.TextPrompt(text="a" * 100_000)
    for fills_window, max_tokens in ((True, None), (False, 128)):
        message = generate(prompt, max_tokens=128, max_length=1000, fills_window=fills_window)
        (refuse,) = commands(tokenizer, message)
        assert isinstance(refuse, Refuse)
        overflow = Overflow(num_prompt=11112, max_length=1000, max_tokens=max_tokens, is_counted=False)
        assert refuse.refusal == overflow.refusal()


@pytest.mark.parametrize("limit", [3, 10, 24, 25, 26, 27, 100])
@pytest.mark.parametrize("end_token", [None, END])
@pytest.mark.parametrize("template", ["<|bos|> $A <|end|>", "<|bos|> $A", "$A <|end|>", "$A"])
def test_a_cut_text_keeps_the_tokens_around_it(
    model_folder: Path, tokenizer: Tokenizer, template: str, end_token: int | None, limit: int
) -> None:
    library = tokenizers.Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    names = {token: name for name, token in tokenizer.special_tokens.items()}
    begin, end = names[BEGIN], names[END]
    form = template.replace("<|bos|>", begin).replace("<|end|>", end)
    library.post_processor = TemplateProcessing(single=form, special_tokens=[(begin, BEGIN), (end, END)])
    message = generate(
        TEXT, max_tokens=None, max_length=limit, cuts_prompt=True, pooling=PoolingParams(), end_token=end_token
    )
    (submit,) = commands(Tokenizer(library), message)
    assert isinstance(submit, Submit)
    before = [BEGIN] if template.startswith("<") else []
    after = [END] if template.endswith(">") or end_token is not None else []
    inner = tokenizer.encode(TEXT.text, add_special_tokens=False).tolist()
    kept = inner[: limit - len(before) - len(after)]
    assert np.frombuffer(submit.tokens, "<i4").tolist() == [*before, *kept, *after]
