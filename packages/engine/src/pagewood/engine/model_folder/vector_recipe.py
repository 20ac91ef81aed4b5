"""Reads how a model turns texts into vectors, or pairs of texts into scores. Imports neither torch nor transformers.

The files are those of sentence-transformers: `modules.json` and the folders that it names,
`config_sentence_transformers.json` and `sentence_bert_config.json`. A folder without them gives the last hidden state,
normalised; of an encoder, the mean of all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.api import PoolingParams, SamplingParams, TokenLogprob
from pagewood.engine.json_fields import Fields
from pagewood.engine.model_folder.sentence_modules import activation_named, dense_modules, sentence_modules
from pagewood.engine.text.template_files import chat_templates

DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""The instruction for Qwen3-Reranker if the caller gives none."""

_LARGEST = (1 << 31) - 1
_ENCODERS = frozenset({"bert", "distilbert", "mpnet", "modernbert", "nomic_bert", "roberta", "xlm-roberta"})
"""The `model_type` of models that give the mean of all states unless a module says otherwise."""
_KINDS: Mapping[str, Literal["last", "mean", "cls"]] = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
_FLAGS = {
    "pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max", "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}  # fmt: skip
_SURE = 100.0
"""Added to the logits of two tokens, this makes the probability of all others 0 in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairScoring:
    """A reranker: the score of a pair is the probability of one token against another after the prompt of the pair.

    Both get the largest bias, so the token is drawn from the distribution of the two, to about 1e-5. The score then
    follows from the processed log probability of one of them.
    """

    true_token: int
    false_token: int
    has_template: bool = False
    """Whether the chat template has the roles `query` and `document`; otherwise the prompt is that of
    Qwen3-Reranker."""

    @property
    def sampling(self) -> SamplingParams:
        """The parameters of the request for the score: one of two tokens."""
        return SamplingParams(
            max_tokens=1,
            temperature=1.0,
            seed=0,
            ignore_eos=True,
            logit_bias=((self.true_token, _SURE), (self.false_token, _SURE)),
            logprobs=2,
            logprobs_kind="processed",
        )

    def score(self, logprobs: Sequence[TokenLogprob]) -> float:
        """Return the score of a pair in [0, 1], given the report of the one token."""
        return self.score_of(logprobs[0].top)

    def score_of(self, top: Sequence[tuple[int, float]]) -> float:
        """Return the score of a pair in [0, 1], given its most probable tokens with their log probabilities."""
        return math.exp(dict(top).get(self.true_token, -math.inf))

    def messages(self, query: str, document: str, *, instruction: str | None = None) -> list[dict[str, str]]:
        """Return the conversation of a pair for the chat template."""
        system = [] if instruction is None else [{"role": "system", "content": instruction}]
        return [*system, {"role": "query", "content": query}, {"role": "document", "content": document}]

    def text(self, query: str, document: str, *, instruction: str | None = None) -> str:
        """Return the prompt of a pair, in the form that Qwen3-Reranker is trained with."""
        return (
            "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
            'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
            f"<Instruct>: {instruction or DEFAULT_INSTRUCTION}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
            "<|im_start|>assistant\n<think>\n\n</think>\n\n"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadScoring:
    """A reranker with a head: the score of a pair is made of the vector of one text, which has both.

    Its model makes no other vectors.
    """

    pooling: PoolingParams
    """The pooling of states before the head."""
    type_stride: int = 0
    """What is added to the ids of the second text: the size of the vocabulary if the model tells texts apart by a type
    of their tokens, because it has each token once for each type; 0: it does not."""
    is_probability: bool = True
    """Whether the score is the sigmoid of what the head returns."""

    def score(self, vector: NDArray[np.float32]) -> float:
        """Return the score of a pair, given the vector `[1]` of its text."""
        logit = float(vector[0])
        if not self.is_probability:
            return logit
        return 1 / (1 + math.exp(-logit)) if logit >= 0 else math.exp(logit) / (1 + math.exp(logit))


Scoring = PairScoring | HeadScoring


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorRecipe:
    """How a model turns texts into vectors."""

    pooling: PoolingParams = field(default_factory=PoolingParams)
    prompts: Mapping[str, str] = field(default_factory=dict[str, str])
    """Texts to put before a text, by name, such as `query`."""
    default_prompt: str | None = None
    """The name of the prompt that is used if the caller names none."""
    max_tokens: int | None = None
    """Longest text in tokens; None: the engine's longest request."""
    lowers_case: bool = False
    end_token: int | None = None
    """Ends every text, unless the tokenizer has appended it; None: only the tokenizer appends tokens."""
    scoring: Scoring | None = None
    """How pairs get scores; None: by the cosine of their vectors."""
    size: int | None = None
    """Elements of a vector behind the last Dense module; None: there is none, so as many as a state has."""

    def text(self, text: str, *, prompt_name: str | None = None) -> str:
        """Return the string to tokenize for a text: the text after a prompt.

        Raises:
            ValueError: there is no prompt with this name.
        """
        name = self.default_prompt if prompt_name is None else prompt_name
        if name is not None and name not in self.prompts:
            known = ", ".join(self.prompts) or "none: this model has no prompts"
            raise ValueError(f"prompt_name must be one of {known}, got {name!r}")
        whole = text if name is None else self.prompts[name] + text
        return whole.lower() if self.lowers_case else whole

    def prompt_of(self, kind: Literal["query", "document"]) -> str | None:
        """Return the name of the prompt of queries or documents; None: the default."""
        return kind if kind in self.prompts else None

    def longest(self, max_length: int) -> int:
        """Return the longest text in tokens, for an engine whose longest request has `max_length`."""
        return max_length if self.max_tokens is None else min(max_length, self.max_tokens)


def with_end(tokens: NDArray[np.int32], end_token: int | None) -> NDArray[np.int32]:
    """Return the tokens of a text, with `end_token` appended if it is given and missing."""
    if end_token is None or (len(tokens) and int(tokens[-1]) == end_token):
        return tokens
    return np.append(tokens, np.int32(end_token))


def cut(tokens: NDArray[np.int32], inner: NDArray[np.int32], limit: int) -> NDArray[np.int32]:
    """Return the tokens of a text without its end. Tokens that the tokenizer has put around the text stay.

    Args:
        tokens: [num_tokens] int32, of the text and around it.
        inner: [num_inner] int32, of the text alone.
        limit: number of tokens to keep.
    """
    num_added = len(tokens) - len(inner)
    start = next((i for i in range(num_added + 1) if np.array_equal(tokens[i : i + len(inner)], inner)), 0)
    return np.concatenate((tokens[:start], inner[: max(0, limit - num_added)], tokens[start + len(inner) :]))


def cosine(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """Return the cosine of the angle between two vectors; 0 if one has no length."""
    lengths = float(np.linalg.norm(one)) * float(np.linalg.norm(other))
    found = float(np.dot(one.astype(np.float64), other)) / lengths if lengths > 0.0 else 0.0
    return min(1.0, max(-1.0, found))  # rounding


def read_vector_recipe(folder: str | Path) -> VectorRecipe:
    """Read the recipe of a folder.

    Raises:
        ValueError: a file is damaged, or needs something that is not supported.
    """
    folder = Path(folder)
    modules = sentence_modules(folder)
    pooling = _usual_pooling(folder)
    scoring: Scoring | None = _head(folder) or _classifier(folder)
    kinds = [kind for kind, _ in modules]
    if "Dense" in kinds and kinds.index("Dense") < (kinds.index("Pooling") if "Pooling" in kinds else len(kinds)):
        raise ValueError(f"{folder / 'modules.json'} must have Dense behind Pooling, got {', '.join(kinds)}")
    for kind, path in modules:
        if kind == "Pooling":
            pooling = _pooling(folder / path / "config.json", normalize="Normalize" in kinds)
        elif kind == "LogitScore":
            scoring = _logit_score(folder, folder / path / "config.json")
        elif kind not in ("Transformer", "Normalize", "Dense"):
            raise ValueError(
                f"{folder / 'modules.json'} must name modules of type Transformer, Pooling, Dense, Normalize or "
                f"LogitScore, got {kind}"
            )
    files = (folder / "config_sentence_transformers.json", folder / "sentence_bert_config.json")
    prompted, limited = (Fields.from_file(file) if file.is_file() else Fields(str(file), {}) for file in files)
    prompts = prompted.section("prompts") or prompted.empty("prompts")
    return VectorRecipe(
        pooling=pooling,
        prompts={name: prompts.text(name) for name in prompts.values},
        default_prompt=prompted.text("default_prompt_name", "") or None,
        max_tokens=limited.integer("max_seq_length", 0, high=_LARGEST) or None,
        lowers_case=limited.flag("do_lower_case", False),
        end_token=_end_token(folder),
        scoring=scoring,
        size=next((one.out_features for one in reversed(dense_modules(folder))), None),
    )


def _usual_pooling(folder: Path) -> PoolingParams:
    """Return the pooling of a folder without a module for it."""
    file = folder / "config.json"
    if not file.is_file():
        return PoolingParams()
    fields = Fields.from_file(file)
    is_encoder = fields.text("model_type", "") in _ENCODERS or fields.flag("use_bidirectional_attention", False)
    return PoolingParams(kind="mean" if is_encoder else "last")


def _pooling(file: Path, *, normalize: bool) -> PoolingParams:
    """Read the pooling of a module."""
    fields = Fields.from_file(file)
    if "pooling_mode" in fields.values:
        modes = fields.texts("pooling_mode") or ()
    else:
        modes = tuple(mode for flag, mode in _FLAGS.items() if fields.flag(flag, False))
    if len(modes) != 1 or modes[0] not in _KINDS:
        raise ValueError(f"{file}: pooling must be one of {', '.join(_KINDS)}, got {' and '.join(modes) or 'none'}")
    if not fields.flag("include_prompt", True):
        raise ValueError(f"{file}: include_prompt must be true, got false")
    return PoolingParams(kind=_KINDS[modes[0]], normalize=normalize)


def _logit_score(folder: Path, file: Path) -> PairScoring:
    """Read a module that compares the logits of two tokens."""
    fields = Fields.from_file(file)
    if fields.values.get("false_token_id") is None:
        raise ValueError(f"{file}: false_token_id must be a token, got none: scores of one logit are not supported")
    return PairScoring(
        true_token=fields.integer("true_token_id", high=_LARGEST),
        false_token=fields.integer("false_token_id", high=_LARGEST),
        has_template=_has_roles(folder),
    )


def _classifier(folder: Path) -> PairScoring | None:
    """Read `classifier_from_token` of config.json, the tokens of no and yes, as vLLM does for Qwen3-Reranker."""
    file = folder / "config.json"
    tokens = Fields.from_file(file).texts("classifier_from_token") if file.is_file() else None
    if tokens is None:
        return None
    if len(tokens) != 2:
        raise ValueError(f"{file}: classifier_from_token must name two tokens, got {len(tokens)}")
    false_token, true_token = (_token_id(folder, token) for token in tokens)
    return PairScoring(true_token=true_token, false_token=false_token, has_template=_has_roles(folder))


def _head(folder: Path) -> HeadScoring | None:
    """Return how a model with a head scores pairs; None: it has no head."""
    file = folder / "config.json"
    if not file.is_file():
        return None
    fields = Fields.from_file(file)
    if not (fields.texts("architectures") or [""])[0].endswith("ForSequenceClassification"):
        return None
    labels = fields.section("id2label")
    num_labels = 2 if labels is None else len(labels.values)
    num_labels = fields.integer("num_labels", num_labels, high=_LARGEST)
    if num_labels != 1:
        raise ValueError(f"{file}: a model that scores pairs must have one label, got {num_labels}")
    own = fields.section("sentence_transformers") or fields.empty("sentence_transformers")
    if "activation_fn" in own.values:
        activation = activation_named(own, "activation_fn", "Sigmoid")
    else:
        activation = activation_named(fields, "sbert_ce_default_activation_function", "Sigmoid")
    if activation not in ("none", "sigmoid"):
        raise ValueError(f"{file}: the activation of scores must be Sigmoid or Identity, got {activation}")
    has_types = fields.text("model_type", "") == "bert" and fields.integer("type_vocab_size", 2, high=_LARGEST) > 1
    return HeadScoring(
        pooling=PoolingParams(
            kind="mean" if fields.text("classifier_pooling", "cls") == "mean" else "cls", normalize=False
        ),
        type_stride=fields.integer("vocab_size", high=_LARGEST) if has_types else 0,
        is_probability=activation == "sigmoid",
    )


def _has_roles(folder: Path) -> bool:
    """Return whether the chat template of a folder is one for pairs."""
    source = chat_templates(folder).get("default", "")
    return all(f'"{role}"' in source or f"'{role}'" in source for role in ("query", "document"))


def _end_token(folder: Path) -> int | None:
    """Return the end token if `add_eos_token` of tokenizer_config.json is true; otherwise None."""
    file = folder / "tokenizer_config.json"
    fields = Fields.from_file(file) if file.is_file() else Fields(str(file), {})
    if not fields.flag("add_eos_token", False):
        return None
    token = fields.values.get("eos_token")
    if isinstance(token, dict):
        token = cast("dict[str, object]", token).get("content")
    if not isinstance(token, str):
        raise ValueError(f"{file}: eos_token must be given with add_eos_token, got {token!r:.80}")
    return _token_id(folder, token)


def _token_id(folder: Path, token: str) -> int:
    """Return the id of a token in tokenizer.json, by its text there."""
    file = folder / "tokenizer.json"
    fields = Fields.from_file(file)
    for entry in cast("list[dict[str, object]]", fields.values.get("added_tokens") or []):
        if entry.get("content") == token:
            return Fields(str(file), entry).integer("id", high=_LARGEST)
    section = fields.section("model") or fields.empty("model")
    vocab = section.values.get("vocab")
    found = cast("dict[str, object]", vocab).get(token) if isinstance(vocab, dict) else None
    if not isinstance(found, int):
        raise ValueError(f"{file} must have the token {token!r:.80}")
    return found
