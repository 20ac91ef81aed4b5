"""The adapter_config.json of PEFT: what it says of ranks and scales, and what of it is not computed here."""

# pyright: basic
# re2 has no types.

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import re2

from pagewood.engine.json_fields import Fields, shown

CONFIG = "adapter_config.json"
_READ = (
    "peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "lora_bias", "bias",
    "target_modules", "alora_invocation_tokens", "trainable_token_indices", "ensure_weight_tying",
    "modules_to_save", "target_parameters",
)  # fmt: skip
_OF_TRAINING = (
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "exclude_modules", "lora_dropout", "fan_in_fan_out", "init_lora_weights", "layers_to_transform", "layers_pattern",
    "megatron_config", "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config",
    "qalora_group_size", "runtime_config",
)  # fmt: skip
"""Fields that say how an adapter was trained or where it was put, which its tensors show."""
_MOST_PATTERNS, _MOST_CHARACTERS, _PATTERN_BYTES = 4096, 1024, 1 << 18
"""Limits of rank_pattern and alpha_pattern: entries, characters of an entry, and bytes of a compiled entry."""
_MOST_INVOCATION = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftConfig:
    """What the configuration of an adapter says of each of its modules.

    Raises:
        ValueError: a field is wrong, or asks for something that is not computed here; the error names the field.
    """

    fields: Fields
    rank: int
    alpha: float
    ranks: tuple[tuple[Any, float], ...]
    """Expressions and the rank of the modules that they match, in their order."""
    alphas: tuple[tuple[Any, float], ...]
    is_by_root: bool
    """Whether alpha is divided by the square root of the rank (rsLoRA)."""
    has_magnitudes: bool
    """Whether rows have magnitudes (DoRA)."""
    has_bias: bool
    """Whether it has biases of its own behind B."""
    replaces_bias: bool
    """Whether biases of the modules are replaced."""
    invocation: tuple[int, ...]
    """Tokens that activate it (aLoRA); empty: it is always active."""
    tokens: tuple[int, ...]
    """Tokens whose rows of the embedding are replaced."""
    saved: tuple[str, ...]
    """Ends of the names of modules that it replaces as a whole."""
    ties_ends: bool
    """Whether what changes the embedding changes an output projection with the same table too."""
    targets: tuple[str, ...]
    """Ends of the names of modules that it may change; empty: an expression says it."""
    parameters: tuple[str, ...]
    """Ends of the names of parameters of several matrices that it may change."""

    @classmethod
    def from_folder(cls, folder: Path, *, max_rank: int) -> PeftConfig:
        """Read the configuration of an adapter of rank at most `max_rank`.

        Raises:
            FileNotFoundError: the file does not exist.
            ValueError: see the class.
        """
        fields = Fields.from_file(folder / CONFIG)
        kind = fields.text("peft_type")
        if kind != "LORA":
            raise ValueError(f"{fields.source}: peft_type must be LORA, got {shown(kind)}")
        for name, value in fields.values.items():
            if name not in _READ and name not in _OF_TRAINING and value not in (None, False, {}, []):
                raise ValueError(
                    f"{fields.source}: {name} must be null, because it is not supported, got {shown(value)}"
                )
        bias = fields.text("bias", "none")
        if bias not in ("none", "lora_only"):
            raise ValueError(f"{fields.source}: bias must be none or lora_only, got {shown(bias)}")
        invocation: Any = fields.values.get("alora_invocation_tokens")
        if invocation is not None:
            if bias != "none":
                raise ValueError(f"{fields.source}: bias must be none with alora_invocation_tokens, got {shown(bias)}")
            is_list = isinstance(invocation, list) and 1 <= len(invocation) <= _MOST_INVOCATION
            if not is_list or not all(type(one) is int and 0 <= one < 2**31 for one in invocation):
                raise ValueError(
                    f"{fields.source}: alora_invocation_tokens must be 1 to {_MOST_INVOCATION} token ids, got "
                    f"{shown(invocation)}"
                )
            for name in ("trainable_token_indices", "modules_to_save"):
                if fields.values.get(name):
                    raise ValueError(f"{fields.source}: {name} must be null with alora_invocation_tokens")
        targets = fields.values.get("target_modules")
        return cls(
            fields=fields,
            rank=fields.integer("r", 8, low=1, high=max_rank),
            alpha=fields.number("lora_alpha", 8.0, low=-1e6, high=1e6),
            ranks=_patterns(fields, "rank_pattern", max_rank),
            alphas=_patterns(fields, "alpha_pattern", 1e6),
            is_by_root=fields.flag("use_rslora", False),
            has_magnitudes=fields.flag("use_dora", False),
            has_bias=fields.flag("lora_bias", False),
            replaces_bias=bias == "lora_only",
            tokens=_replaced_tokens(fields, max_rank),
            saved=() if fields.values.get("modules_to_save") is None else fields.texts("modules_to_save") or (),
            ties_ends=fields.flag("ensure_weight_tying", False),
            invocation=tuple(invocation or ()),
            targets=() if targets is None or isinstance(targets, str) else fields.texts("target_modules") or (),
            parameters=()
            if fields.values.get("target_parameters") is None
            else fields.texts("target_parameters") or (),
        )

    def rank_of(self, module: str) -> int:
        """Return the rank in a module."""
        return int(_found(self.ranks, module, self.rank))

    def scale_of(self, module: str) -> float:
        """Return what multiplies the product of B and A in a module."""
        rank = self.rank_of(module)
        return _found(self.alphas, module, self.alpha) / (math.sqrt(rank) if self.is_by_root else rank)

    def check_parameter(self, parameter: str) -> None:
        """Compare the name of a parameter that has tensors with those that the configuration lists.

        Raises:
            ValueError: it is not among them.
        """
        if not any(parameter == one or parameter.endswith(f".{one}") for one in self.parameters):
            raise ValueError(f"{self.fields.source}: target_parameters must name {parameter}, which has tensors")

    def check_target(self, module: str) -> None:
        """Compare the name of a module that has tensors with those that the configuration lists.

        Raises:
            ValueError: it is not among them.
        """
        if self.targets and not any(module == one or module.endswith(f".{one}") for one in self.targets):
            raise ValueError(f"{self.fields.source}: target_modules must name {module}, which has tensors")


def _replaced_tokens(fields: Fields, most: int) -> tuple[int, ...]:
    found = fields.values.get("trainable_token_indices") or []
    if isinstance(found, dict) and list(found) == ["embed_tokens"]:
        found = found["embed_tokens"]
    if not isinstance(found, list) or not all(type(one) is int and one >= 0 for one in found):
        raise ValueError(
            f"{fields.source}: trainable_token_indices must be token ids, of embed_tokens if it names modules, got "
            f"{shown(found)}"
        )
    if len(found) > most or len(set(found)) < len(found):
        raise ValueError(
            f"{fields.source}: trainable_token_indices must be at most {most} ids, the largest rank, each once, got "
            f"{len(found)}"
        )
    return tuple(found)


def _patterns(fields: Fields, name: str, high: float) -> tuple[tuple[Any, float], ...]:
    section: Fields | None = fields.section(name)
    if section is None:
        return ()
    if len(section.values) > _MOST_PATTERNS:
        raise ValueError(
            f"{fields.source}: {name} must have at most {_MOST_PATTERNS} entries, got {len(section.values)}"
        )
    return tuple((_compiled(section, one), section.number(one, low=-high, high=high)) for one in section.values)


def _compiled(section: Fields, pattern: str) -> Any:
    """Return an expression that matches the whole name of a module or its end; searches take linear time."""
    options = re2.Options()
    for name, value in (("log_errors", False), ("max_mem", _PATTERN_BYTES)):
        setattr(options, name, value)
    if len(pattern) > _MOST_CHARACTERS:
        raise ValueError(
            f"{section.source}: patterns must have at most {_MOST_CHARACTERS} characters, got {len(pattern)}"
        )
    try:
        return re2.compile(rf"(.*\.)?({pattern})", options)
    except re2.error as error:
        raise ValueError(f"{section.source}: {shown(pattern)} must be a regular expression: {error}") from error


def _found(patterns: tuple[tuple[Any, float], ...], module: str, default: float) -> float:
    return next((value for pattern, value in patterns if pattern.fullmatch(module)), default)
