"""Beam search with penalties, biases, grammars and stop strings, against `generate(num_beams=...)` of `transformers`.

The oracle changes the logits by the processors of `transformers` before the log probabilities are taken.
"""

# pyright: basic
# torch and transformers are typed in part only.

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import regex
import torch
import transformers

from pagewood.engine import LLM, BeamSearchParams, BeamSearchResult, FinishReason
from pagewood.engine.api import Grammar, SamplingParams
from pagewood.engine.beam_search import BeamSearch
from pagewood.engine.core import intake
from pagewood.engine.core.messages import adjustments
from pagewood.engine.model_folder.folder import model_folder
from seeded_faults import Edit, seed_fault

ERROR = 1e-3
QUESTION = "Tell me about the moon"
Process = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_total_tokens=4096, max_running=16, max_prefills=16, num_threads=1) as model:
        yield model


@cache
def reference() -> tuple[Any, Any]:
    """Return the model and the tokenizer of `transformers`."""
    folder = model_folder(None)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model, transformers.AutoTokenizer.from_pretrained(folder)


def processors(params: BeamSearchParams, num_prompt: int, eos: list[int], allowed: Process | None) -> list[Process]:
    """Return what changes the logits, in the order of `SamplingParams`."""
    found: list[Any] = []
    if params.repetition_penalty != 1.0:
        found.append(transformers.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))

    def counted(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.zeros_like(scores).scatter_add_(
            1, ids[:, num_prompt:], torch.ones_like(ids[:, num_prompt:], dtype=scores.dtype)
        )
        return scores - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)

    found.append(counted)
    if params.logit_bias:
        biases: Any = {(token,): value for token, value in params.logit_bias}
        found.append(transformers.SequenceBiasLogitsProcessor(sequence_bias=biases))
    if params.min_tokens:
        found.append(transformers.MinNewTokensLengthLogitsProcessor(num_prompt, params.min_tokens, eos))
    if params.bad_words:
        words = [list(word) for word in params.bad_words]
        found.append(transformers.NoBadWordsLogitsProcessor(words, eos_token_id=eos))
    return found + ([] if allowed is None else [allowed])


def expected(
    prompt: list[int], params: BeamSearchParams, eos: tuple[int, ...], allowed: Process | None
) -> list[tuple[tuple[int, ...], float]]:
    """Return the answers of `transformers` without their stop tokens, with their scores."""
    model, tokenizer = reference()
    stops = [*eos, *params.stop_token_ids]
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = stops, stops[0]
    chain = processors(params, len(prompt), stops, allowed)

    def change(_: Any, __: Any, kwargs: dict[str, Any], output: Any) -> Any:
        scores = output.logits[:, -1].float()
        for process in chain:
            scores = process(kwargs["input_ids"], scores)
        output.logits = scores[:, None]
        return output

    hook = model.register_forward_hook(change, with_kwargs=True)
    try:
        found = model.generate(
            torch.tensor([prompt]), num_beams=params.beam_width, num_return_sequences=params.beam_width,
            do_sample=False, max_new_tokens=params.max_tokens, length_penalty=params.length_penalty,
            early_stopping=params.early_stopping, return_dict_in_generate=True, output_scores=True, use_cache=False,
            stop_strings=list(params.stop) or None, tokenizer=tokenizer,
        )  # fmt: skip
    finally:
        hook.remove()
    answers = []
    for row, indices, score in zip(found.sequences, found.beam_indices, found.sequences_scores, strict=True):
        tokens = row[len(prompt) : len(prompt) + int((indices >= 0).sum())].tolist()
        if float(score) > -1e6:  # otherwise it holds a token that is not allowed
            answers.append((tuple(tokens[:-1] if tokens[-1] in stops else tokens), float(score)))
    return answers


def question(llm: LLM) -> list[int]:
    return llm.tokenizer.encode_chat([{"role": "user", "content": QUESTION}]).tolist()


def compare(llm: LLM, params: BeamSearchParams, allowed: Any = None) -> BeamSearchResult:
    """Compare a search with that of `transformers`; `allowed` makes its processor for a length of a prompt."""
    prompt = question(llm)
    (result,) = llm.beam_search([prompt], params)
    process = None if allowed is None else allowed(len(prompt))
    answers = expected(prompt, params, llm.info.eos_token_ids, process)
    assert result.refusal is None
    assert [one.tokens for one in result.sequences] == [tokens for tokens, _ in answers]
    assert [one.score for one in result.sequences] == pytest.approx([score for _, score in answers], abs=ERROR)
    return result


def matching(llm: LLM, expression: str) -> Callable[[int], Process]:
    """Return what makes a processor that allows the texts of an expression, from partial matches of each token."""
    pattern, eos = regex.compile(expression), list(llm.info.eos_token_ids)
    pieces = [llm.tokenizer.token_bytes(token, skip_special_tokens=True) for token in range(llm.info.vocab_size)]

    @cache
    def row(text: bytes) -> torch.Tensor:
        def fits(piece: bytes) -> bool:
            try:
                return bool(piece) and pattern.fullmatch((text + piece).decode(), partial=True) is not None
            except UnicodeDecodeError:
                return False

        allowed = torch.tensor([fits(piece) for piece in pieces])
        allowed[eos] = pattern.fullmatch(text.decode()) is not None or not allowed.any()
        return allowed

    def of(num_prompt: int) -> Process:
        def process(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            texts = [
                b"".join(pieces[token] for token in one if token not in eos) for one in ids[:, num_prompt:].tolist()
            ]
            return scores.masked_fill(~torch.stack([row(text) for text in texts]), -torch.inf)

        return process

    return of


CHANGES: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.3},
    "frequency and presence": {"frequency_penalty": 0.9, "presence_penalty": 0.7},
    "biases and bad words": {"logit_bias": ((73, 2.0), (69, -3.0)), "bad_words": ((276,), (73, 73))},
    "min_tokens": {"min_tokens": 4, "stop_token_ids": (73,), "logit_bias": ((73, 30.0),), "early_stopping": True},
    "all": {
        "repetition_penalty": 0.8, "frequency_penalty": 1.5, "presence_penalty": -0.5, "logit_bias": ((73, 3.0),),
        "bad_words": ((73, 73, 73),), "min_tokens": 4, "length_penalty": 0.3, "early_stopping": "never",
    },
}  # fmt: skip


@pytest.mark.parametrize("changes", CHANGES)
def test_changes_of_logits_follow_each_sequence_by_itself(llm: LLM, changes: str) -> None:
    compare(llm, BeamSearchParams(beam_width=3, max_tokens=8, **CHANGES[changes]))


EXPRESSION = r"[A-Z][a-z]{2,6}( [a-z]{1,5}){0,2}[.!?]"


def test_each_sequence_follows_the_grammar(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=12, grammar=Grammar.regex(EXPRESSION), frequency_penalty=0.5)
    result = compare(llm, params, matching(llm, EXPRESSION))
    ended = [one for one in result.sequences if one.finish is FinishReason.STOP]
    assert ended
    assert all(regex.fullmatch(EXPRESSION, one.text) for one in ended)


def test_stop_strings_end_sequences_as_in_transformers(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=12, stop=("a", "th"), early_stopping=True)
    result = compare(llm, params)
    stopped = [one for one in result.sequences if one.finish is FinishReason.STOP]
    assert any(one.text != llm.tokenizer.decode(one.tokens) for one in stopped)
    for one in stopped:
        assert "a" not in one.text
        assert "th" not in one.text


def test_an_expression_ends_sequences_as_the_same_strings_do(llm: LLM) -> None:
    fields: dict[str, Any] = {"beam_width": 4, "max_tokens": 12}
    prompt = question(llm)
    (strings,) = llm.beam_search([prompt], BeamSearchParams(stop=("a", "th"), **fields))
    (expressions,) = llm.beam_search([prompt], BeamSearchParams(stop_regex=("a|th",), **fields))
    assert strings.sequences == expressions.sequences


def test_a_sequence_without_a_token_that_may_follow_is_dropped(llm: LLM) -> None:
    """Behind `a` the grammar needs a digit, and all of them are forbidden."""
    digits = [token for token in range(llm.info.vocab_size) if llm.tokenizer.token_bytes(token)[:1].isdigit()]
    biases = tuple((token, -float("inf")) for token in digits)
    grammar = Grammar.regex("a[0-9]|[b-y]{2}")
    params = BeamSearchParams(beam_width=30, max_tokens=4, grammar=grammar, logit_bias=biases, early_stopping=True)
    (result,) = llm.beam_search([[1, 2, 3]], params)
    assert {len(one.text) for one in result.sequences if one.finish is FinishReason.STOP} == {2}
    assert not any(one.text.startswith("a") for one in result.sequences)
    (refused,) = llm.beam_search(
        [[1, 2, 3]], BeamSearchParams(beam_width=2, grammar=Grammar.regex("[0-9]+"), logit_bias=biases)
    )
    assert refused.refusal is not None
    assert refused.refusal.code == "all_tokens_excluded"
    assert llm.beam_search([[1, 2, 3]], BeamSearchParams(beam_width=2, max_tokens=2))[0].refusal is None


def test_a_wrong_grammar_is_refused(llm: LLM) -> None:
    (result,) = llm.beam_search([[1, 2]], BeamSearchParams(beam_width=2, grammar=Grammar.regex("(")))
    assert result.refusal is not None
    assert result.refusal.code == "invalid_grammar"


def test_a_search_without_changes_asks_for_none() -> None:
    params = BeamSearchParams(beam_width=3, stop=("x",))
    assert not params.changes_logits
    assert params.step_sampling(frozenset({7})) == SamplingParams(
        max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=7
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"frequency_penalty": 3.0}, r"frequency_penalty must be in \[-2, 2\], got 3.0"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty must be in \(0, 100\], got 0.0"),
        ({"min_tokens": 5, "max_tokens": 4}, r"min_tokens must be >= 0 and at most max_tokens \(4\), got 5"),
        ({"bad_words": ((),)}, "bad_words must hold sequences of 1 to 32 tokens, got 0"),
    ],
)
def test_values_out_of_range_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BeamSearchParams(beam_width=2, **fields)


def test_an_empty_stop_string_is_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match="stop must hold no empty string"):
        llm.beam_search([1], BeamSearchParams(beam_width=2, stop=("",)))


Check = Callable[[LLM], None]


def check(changes: str) -> Check:
    return lambda llm: test_changes_of_logits_follow_each_sequence_by_itself(llm, changes)


FAULTS: dict[str, tuple[Edit, Check]] = {
    "the output does not count": (
        (adjustments.Adjustments, "of", "one.num_prompt for", "one.num_prompt + 99 for"),
        check("frequency and presence"),
    ),
    "the grammar begins anew in each step": (
        (intake.Intake, "poll", "request.num_prompt : request.num_known", "0:0"),
        test_each_sequence_follows_the_grammar,
    ),
    "min_tokens is ignored": (
        (BeamSearchParams, "step_sampling", "min(self.min_tokens, num_output + 1)", "0"), check("min_tokens")
    ),
    "a stop string is continued": (
        (BeamSearch, "take", "is_over or", "is_stop or"), test_stop_strings_end_sequences_as_in_transformers
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    edit, find = FAULTS[fault]
    seed_fault([edit], monkeypatch)
    with pytest.raises((AssertionError, ValueError)):
        find(llm)
