"""Loads a causal model of `transformers` from a folder, after a look at what pages cannot hold of it.

No code of the folder is run, and no pickled weights are read.
"""

# pyright: basic
# torch and transformers are typed in part only.

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import logging as transformers_logging

from pagewood.engine.api import Progress
from pagewood.engine.json_fields import Fields
from pagewood.engine.models.fields.end_tokens import tokenizer_end
from pagewood.engine.models.limits import LARGEST
from pagewood.engine.runner.transformers.interface import NAME
from pagewood.engine.runner.transformers.model import TransformersModel
from pagewood.engine.runner.transformers.shape import FoundShape, check_parts, find_shape

_log = logging.getLogger(__name__)

_KINDS = (
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "indexed_attention",
    "minimax_m3_sparse",
    "moe",
    "mlp",
)
"""Kinds of layers in `layer_types` whose cache is keys and values, those of an indexer too, or nothing."""
_LENGTHS = ("max_position_embeddings", "max_seq_len", "seq_length", "max_target_positions")
"""Names of the field for the longest text; the first that has a value counts, and -1 is none."""
_USUAL_LENGTH = 2048
"""Longest text if no field says it: positions that are distances have no end."""
_GROWING_ROPES = ("dynamic", "longrope")
"""Ropes whose frequencies depend on the longest text of a step, beyond the length that the model was trained with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundModel:
    """A folder that `transformers` can load, before its weights are read."""

    folder: Path
    kind: type
    """The class of the model."""
    config: Any
    attention: str
    """The `attn_implementation` to begin with: `interface.NAME`, or for a class that attends by itself "eager"."""
    max_position: int
    """Longest text."""
    num_parameters: int

    @classmethod
    def of(cls, folder: Path) -> FoundModel:
        """Look at a folder.

        Raises:
            FileNotFoundError: it has no config.json.
            ValueError: its model is no causal one that `transformers` knows, or has a cache of another kind.
        """
        source = folder / "config.json"
        if not source.is_file():
            raise FileNotFoundError(f"model must have a config.json, got {folder}")
        try:
            config: Any = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
            kind: Any = transformers.AutoModelForCausalLM._model_mapping[type(config)]  # not public
            if isinstance(kind, tuple):
                kind = kind[0]
        except (KeyError, OSError, TypeError, AttributeError) as error:
            raise ValueError(f"{source}: must be of a causal model that transformers has, got {error}") from error
        try:
            text = config.get_text_config()
        except ValueError as error:
            raise ValueError(f"{kind.__name__} must have one decoder, got several: {error}") from error
        _check_cache(kind, text)
        empty, attention = _empty(kind, config)
        return cls(
            folder=folder,
            kind=kind,
            config=config,
            attention=attention,
            max_position=_longest(text),
            num_parameters=sum(one.numel() for one in empty.parameters()),
        )

    @property
    def name(self) -> str:
        """The name of the class."""
        return self.kind.__name__

    @property
    def padding(self) -> int | None:
        """The token that pads texts, if there is one; some classes do not count it as a position."""
        return getattr(self.config.get_text_config(), "pad_token_id", None)

    def end_tokens(self, vocab_size: int) -> tuple[int, ...]:
        """Return the tokens that end a text, as `ModelConfig.from_folder` finds them.

        Raises:
            ValueError: a file is damaged.
        """
        fields, path = Fields.from_file(self.folder / "config.json"), self.folder / "generation_config.json"
        text = fields.section("text_config") or fields
        generation = Fields.from_file(path) if path.exists() else fields.empty("generation")
        tokens: tuple[int, ...] = ()
        for each in (generation, fields, text):
            tokens = tokens or each.integers("eos_token_id", high=vocab_size - 1)
        end = tokenizer_end(self.folder)
        return tokens if end is None or end in tokens or end >= vocab_size else (*tokens, end)


def load(
    found: FoundModel, *, dtype: torch.dtype, device: torch.device, progress: Progress | None = None
) -> tuple[TransformersModel, FoundShape]:
    """Load the weights of a model; return it, and its shape.

    Raises:
        ValueError: the files lack weights, or the model needs more than keys and values in pages.
    """
    if progress:
        progress(f"reading weights of {found.name} with transformers", 0, 1)
    with _quiet():
        try:
            whole, report = found.kind.from_pretrained(  # pyright: ignore[reportAttributeAccessIssue]
                found.folder,
                config=found.config,
                dtype=dtype,
                attn_implementation=found.attention,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
            )
        except (OSError, ImportError, RuntimeError, KeyError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise ValueError(f"{found.folder} must hold weights that transformers loads, got {error}") from error
    lacking = sorted(map(str, report["missing_keys"]))
    if lacking:
        raise ValueError(f"{found.folder} must hold all weights of {found.name}, and lacks {', '.join(lacking[:3])}")
    with torch.inference_mode():
        model, shape = _probed(found, whole.to(device).eval(), dtype=dtype, device=device)
    if progress:
        progress(f"reading weights of {found.name} with transformers", 1, 1)
    return model, shape


def _empty(kind: Any, config: Any) -> tuple[Any, str]:
    """Return a model without memory for its weights, and the `attn_implementation` to begin with.

    Raises:
        ValueError: the class cannot be made of the configuration.
    """
    error: Exception | None = None
    for attention in (NAME, "eager"):
        try:
            with torch.device("meta"):
                return kind._from_config(config, attn_implementation=attention), attention
        except (KeyError, ImportError, TypeError, ValueError, AttributeError, RuntimeError) as caught:
            error = caught
    raise ValueError(f"config.json must be one that {kind.__name__} can be made of, got {error!r}") from error


def _probed(
    found: FoundModel, whole: Any, *, dtype: torch.dtype, device: torch.device
) -> tuple[TransformersModel, FoundShape]:
    """Return a model that attends through the interface, or else by itself over caches; and its shape.

    Raises:
        ValueError: keys and values in pages are not all that it needs; the message says what it is.
    """
    model, reason = TransformersModel(whole), "its attention does not go there"
    if found.attention == NAME:
        try:
            return model, _shape_of(model, found.padding, dtype=dtype, device=device)
        except ValueError as error:
            reason = str(error)
    try:
        model.attend_by_itself()
        shape = _shape_of(model, found.padding, dtype=dtype, device=device)
    except ValueError as error:
        raise ValueError(
            f"{found.name} must keep nothing of a text but keys and values, got in the attention interface of "
            f"transformers: {reason}; with a cache: {error}"
        ) from error
    _log.info(
        "%s attends over a cache in our pages, for one request after the other, because the attention interface of "
        "transformers does not suffice: %s",
        found.name,
        reason,
    )
    return model, shape


def _shape_of(model: TransformersModel, padding: int | None, *, dtype: torch.dtype, device: torch.device) -> FoundShape:
    """Return the shape of a model that computes in parts what its class computes.

    Raises:
        ValueError: it does not.
    """
    try:
        shape = find_shape(model, device=device)
        check_parts(model, shape, padding=padding, dtype=dtype, device=device)
    except (TypeError, AttributeError, KeyError, IndexError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise ValueError(repr(error)) from error
    return shape


def _check_cache(kind: Any, text: Any) -> None:
    """Check that a model has no state but keys and values.

    Raises:
        ValueError: it says that it has.
    """
    others = sorted(set(getattr(text, "layer_types", None) or ()) - set(_KINDS))
    if others or getattr(kind, "_is_stateful", False):
        what = f"layers of {', '.join(others)}" if others else "a state that is not keys and values"
        raise ValueError(f"{kind.__name__} must have keys and values of all positions as its only cache, got {what}")
    if getattr(text, "is_encoder_decoder", False):
        raise ValueError(f"{kind.__name__} must be a decoder alone, got one behind an encoder")


def _longest(text: Any) -> int:
    """Return the longest text that positions and ropes allow.

    Raises:
        ValueError: a field for it has another value than a length.
    """
    name = next((name for name in _LENGTHS if getattr(text, name, None) not in (None, -1)), None)
    longest = _USUAL_LENGTH if name is None else getattr(text, name)
    if not isinstance(longest, int) or not 1 <= longest <= LARGEST["max_position"]:
        raise ValueError(f"{name} must be in [1, {LARGEST['max_position']}], got {longest!r}")
    if name is None:
        _log.info("config.json does not say how long a text may be: at most %d tokens", longest)
    parameters: Mapping[str, Any] = getattr(text, "rope_parameters", None) or {}
    ropes = [parameters, *(one for one in parameters.values() if isinstance(one, dict))]
    for rope in ropes:
        if rope.get("rope_type") in _GROWING_ROPES:
            # Beyond it the frequencies would depend on the other texts of a step.
            longest = min(longest, rope.get("original_max_position_embeddings") or longest)
    return longest


@contextmanager
def _quiet() -> Generator[None]:
    """Hide the bars of `transformers`; the engine reports what it loads by itself."""
    was_shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_shown:
            transformers_logging.enable_progress_bar()
