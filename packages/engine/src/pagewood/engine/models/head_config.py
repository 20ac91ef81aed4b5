"""The configuration of a drafting head, read from its folder. Imports neither torch nor transformers.

A head drafts from the hidden states of a target model. EAGLE-3 heads ship in a folder of their own; the layers for
multi-token prediction (MTP, NextN) ship inside the checkpoint of their target. Both are values of `HeadConfig`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pagewood.engine.json_fields import Fields, check_same
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.parts.attention import AttentionConfig
from pagewood.engine.models.parts.choice import paged_part
from pagewood.engine.models.parts.experts import ExpertsConfig
from pagewood.engine.models.parts.norm import NormConfig
from pagewood.engine.models.shard import Shard
from pagewood.engine.models.stage import HeadNeeds
from pagewood.engine.models.stored.checkpoint_files import tensor_names

_MAX_CAPTURED = 64
_MAX_SIZE = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNames:
    """Names of a head's tensors in its checkpoint; norms and projections without ".weight"."""

    layers: tuple[str, ...]
    """Prefix of each layer."""
    projection: str
    """Projects several captured states (EAGLE-3), or a token and a hidden state (MTP), to one hidden state."""
    hidden_norm: str
    norm: str
    """The norm before the output projection."""
    token_norm: str | None = None
    """None: the input norm of the first layer normalises the token."""
    feature_norms: tuple[str, ...] = ()
    """Norms of the captured states: one for each, or one for all of them side by side."""
    embedding: str | None = None
    """None: the target's embedding is used. The same for `output`."""
    output: str | None = None
    token_map: str | None = None
    """For each token of the head, its id in the target minus its id in the head. None: the ids are equal."""
    ignored: tuple[str, ...] = ()
    """Prefixes of tensors that are not read: copies of the target's, or the reverse of `token_map`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """A drafting head in numbers: all differences between EAGLE-3 and MTP heads are values here."""

    kind: Literal["eagle3", "mtp"]
    layer: ModelConfig
    """Its layers, which are ordinary ones; `vocab_size` is the target's."""
    target_hidden_size: int
    captured: tuple[int, ...]
    """The target's hidden states that it reads, see `Decoder.states`."""
    output_size: int
    """Number of tokens that it can draft."""
    names: HeadNames
    has_wide_attention: bool
    """Whether token and hidden state enter the first layer's attention side by side (EAGLE-3), or are projected to one
    hidden state before the layer (MTP)."""
    norm_before_residual: bool = False
    """Whether the residual stream starts with the hidden state after its norm. EAGLE-3 only."""
    feeds_norm: bool = False
    """Whether the next step gets the hidden state after the last norm, or before it."""
    hidden_first: bool = False
    """Whether the hidden state comes before the token in the projection. MTP only."""
    clears_first: bool = False
    """Whether the token at position 0 has an embedding of zeros."""

    @property
    def needs(self) -> HeadNeeds:
        """What it reads of a target that is cut into stages."""
        return HeadNeeds(captured=self.captured, embeds=self.names.embedding is None)

    def for_shard(self, shard: Shard) -> HeadConfig:
        """Return what a rank has of it.

        Raises:
            ValueError: a number cannot be divided among the ranks.
        """
        return self if shard.is_whole else replace(self, layer=self.layer.for_shard(shard))

    @classmethod
    def from_folder(
        cls, folder: str | Path, target: ModelConfig, *, captured: Sequence[int] | None = None
    ) -> HeadConfig:
        """Read config.json and the names of the tensors.

        Args:
            folder: of an EAGLE-3 head, or of a target whose checkpoint has layers for multi-token prediction.
            target: the model that the head drafts for.
            captured: replaces the states that the folder names, because checkpoints disagree about their numbering.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: there is no head, its kind is not supported, or it does not fit the target.
        """
        folder = Path(folder)
        fields, names = Fields.from_file(folder / "config.json"), tensor_names(folder)
        found = find_head_names(names)
        if found is None:
            raise ValueError(
                f"{folder} must hold an EAGLE-3 head or layers for multi-token prediction, "
                f"got {len(names)} tensors with names of neither"
            )
        if found.layers[0] == f"model.layers.{_layer_number(found.layers[0])}":
            number = _layer_number(found.layers[0])
            if number != target.num_layers:
                raise ValueError(f"{folder}: the head must be layer {target.num_layers}, got layer {number}")
        config = _read_eagle(fields, names, target) if found.token_norm is None else _read_mtp(found, target)
        if captured is not None:
            config = replace(config, captured=tuple(captured))
        _check(config, fields.source)
        last = target.num_layers + (config.kind == "mtp")
        for state in config.captured:
            if not 0 <= state <= last:
                raise ValueError(f"{fields.source}: captured states must be in [0, {last}], got {state}")
        return config


def find_head_names(names: Collection[str]) -> HeadNames | None:
    """Return the names of the head's tensors in a folder, or None if there is no head."""
    for prefix in ("midlayer", "layers.0"):
        if f"{prefix}.hidden_norm.weight" in names and "fc.weight" in names:
            return _eagle_names(names, prefix)
    if "mtp.fc.weight" in names:
        return HeadNames(
            layers=("mtp.layers.0",),
            projection="mtp.fc",
            token_norm="mtp.pre_fc_norm_embedding",
            hidden_norm="mtp.pre_fc_norm_hidden",
            norm="mtp.norm",
        )
    if "model.mtp_layers.0.input_proj.weight" in names:
        prefix = "model.mtp_layers.0"
        return HeadNames(
            layers=(prefix,),
            projection=f"{prefix}.input_proj",
            token_norm=f"{prefix}.token_layernorm",
            hidden_norm=f"{prefix}.hidden_layernorm",
            norm=f"{prefix}.final_layernorm",
        )
    numbers = [_layer_number(name) for name in names if name.endswith(".eh_proj.weight")]
    if not numbers:
        return None
    prefix = f"model.layers.{min(numbers)}"
    return HeadNames(
        layers=(prefix,),
        projection=f"{prefix}.eh_proj",
        token_norm=f"{prefix}.enorm",
        hidden_norm=f"{prefix}.hnorm",
        norm=f"{prefix}.shared_head.norm",
        ignored=(f"{prefix}.shared_head.head.", f"{prefix}.embed_tokens."),
    )


def is_mtp_tensor(name: str, target: ModelConfig) -> bool:
    """Whether a tensor of a target's checkpoint belongs to its layers for multi-token prediction."""
    if name.startswith(("mtp.", "model.mtp_layers.")):
        return True
    return target.num_layers <= _layer_number(name) < target.num_layers + target.num_mtp_layers


def _layer_number(name: str) -> int:
    """Return i of "model.layers.i...", or -1."""
    parts = name.split(".", 3)
    return int(parts[2]) if parts[:2] == ["model", "layers"] and len(parts) > 2 and parts[2].isdecimal() else -1


def _eagle_names(names: Collection[str], first: str) -> HeadNames:
    layers = [first]
    while f"layers.{len(layers)}.input_layernorm.weight" in names:
        layers.append(f"layers.{len(layers)}")
    feature_norms: tuple[str, ...] = ()
    if "input_norm.weight" in names:
        feature_norms = ("input_norm",)
    elif "aux_norm_low.weight" in names:
        feature_norms = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")
    elif "fc_norm.0.weight" in names:
        feature_norms = tuple(f"fc_norm.{i}" for i in range(_MAX_CAPTURED) if f"fc_norm.{i}.weight" in names)
    return HeadNames(
        layers=tuple(layers),
        projection="fc",
        hidden_norm=f"{first}.hidden_norm",
        norm="norm",
        feature_norms=feature_norms,
        embedding="embed_tokens" if "embed_tokens.weight" in names else None,
        output="lm_head" if "lm_head.weight" in names else None,
        token_map="d2t" if "d2t" in names else None,
        ignored=("t2d",),
    )


def _read_eagle(fields: Fields, names: Collection[str], target: ModelConfig) -> HeadConfig:
    source, eagle = fields.source, fields.section("eagle_config") or fields.empty("eagle_config")
    kind = fields.text("speculators_model_type", "eagle3")
    if kind != "eagle3":
        raise ValueError(f"{source}: speculators_model_type must be eagle3, got {kind[:80]!r}")
    is_speculators = "speculators_model_type" in fields.values
    found = find_head_names(names)
    assert found is not None
    qk_norm = f"{found.layers[0]}.self_attn.q_norm.weight" in names
    layer = ModelConfig.of_head(fields.section("transformer_layer_config") or fields, qk_norm=qk_norm)
    if layer.num_layers != len(found.layers):
        raise ValueError(f"{source}: num_hidden_layers must be {len(found.layers)}, got {layer.num_layers}")
    if layer.vocab_size != target.vocab_size:
        raise ValueError(f"{source}: vocab_size must be the target's {target.vocab_size}, got {layer.vocab_size}")
    hidden_size = fields.integer("target_hidden_size", target.hidden_size, low=1, high=_MAX_SIZE)
    if hidden_size != target.hidden_size:
        raise ValueError(f"{source}: target_hidden_size must be {target.hidden_size}, got {hidden_size}")
    if layer.hidden_size != target.hidden_size:
        for name, tensor in ((found.embedding, "embed_tokens.weight"), (found.output, "lm_head.weight")):
            if name is None:
                raise ValueError(
                    f"{source}: hidden_size must be the target's {target.hidden_size} because the head has no "
                    f"{tensor}, got {layer.hidden_size}"
                )
    output_size = fields.integer("draft_vocab_size", layer.vocab_size, low=1, high=layer.vocab_size)
    for name, tensor in ((found.output, "lm_head.weight"), (found.token_map, "d2t")):
        if output_size != layer.vocab_size and name is None:
            raise ValueError(
                f"{source}: draft_vocab_size must be {layer.vocab_size} because the head has no {tensor}, "
                f"got {output_size}"
            )

    def flag(name: str, default: bool) -> bool:
        check_same(source, [(name, fields.values.get(name)), (f"eagle_config.{name}", eagle.values.get(name))])
        return fields.flag(name, eagle.flag(name, default))

    for name in ("norm_before_fc", "fc_norm"):
        if flag(name, False) and not found.feature_norms:
            raise ValueError(f"{source}: {name} must be false because the head has no such norm, got true")
    return HeadConfig(
        kind="eagle3",
        layer=layer,
        target_hidden_size=hidden_size,
        captured=_captured(fields, eagle, target, is_speculators=is_speculators),
        output_size=output_size,
        names=found,
        has_wide_attention=True,
        norm_before_residual=flag("norm_before_residual", is_speculators),
        feeds_norm=flag("norm_output", False),
    )


def _captured(fields: Fields, eagle: Fields, target: ModelConfig, *, is_speculators: bool) -> tuple[int, ...]:
    """Return the states that a folder names: explicit ids mean after the layer, in speculators' format before it."""
    name = "eagle_aux_hidden_state_layer_ids"
    num_layers = target.num_layers
    check_same(fields.source, [(name, fields.values.get(name)), (f"eagle_config.{name}", eagle.values.get(name))])
    ids = eagle.integers(name, high=num_layers) or fields.integers(name, high=num_layers)
    if ids:
        return tuple(i if is_speculators else i + 1 for i in ids)
    count = fields.integer("num_aux_hidden_states", 3, low=1, high=_MAX_CAPTURED)
    if count != 3:
        raise ValueError(f"{fields.source}: {name} must name {count} layers, got none")
    if num_layers < 4:
        raise ValueError(f"{fields.source}: {name} must be given for a target of {num_layers} layers, got none")
    return 2, num_layers // 2, num_layers - 3


def _read_mtp(found: HeadNames, target: ModelConfig) -> HeadConfig:
    is_mimo, is_qwen = found.projection.endswith("input_proj"), found.projection == "mtp.fc"
    return HeadConfig(
        kind="mtp",
        layer=_one_layer(target, NormConfig(epsilon=target.norm.epsilon, offset=1.0 if is_qwen else 0.0)),
        target_hidden_size=target.hidden_size,
        captured=(target.num_layers + 1,),
        output_size=target.vocab_size,
        names=found,
        has_wide_attention=False,
        feeds_norm=True,
        hidden_first=is_mimo,
        clears_first=not is_qwen,
    )


def _one_layer(target: ModelConfig, norm: NormConfig) -> ModelConfig:
    """Return the target with its last layer that attends only, without a window, and with other norms."""
    with_pages = [(one, own) for one in target.layers if (own := paged_part(one.mixer)) is not None]
    if not with_pages:
        raise ValueError(f"a head needs a target with attention, got {target.architecture}")
    layer, mixer = with_pages[-1]
    if isinstance(mixer, AttentionConfig):
        mixer = replace(mixer, window=None, qk_norm=None if mixer.qk_norm is None else norm)
    feed_forward = layer.feed_forward
    if isinstance(feed_forward, ExpertsConfig):
        feed_forward = replace(feed_forward, counted_as=None)  # its rows are not those of the target's last layer
    return replace(target, norm=norm, layers=(replace(layer, mixer=mixer, norm=norm, feed_forward=feed_forward),))


def _check(config: HeadConfig, source: str) -> None:
    """Raise ValueError if the number of captured states contradicts the other numbers."""
    count, num_norms = len(config.captured), len(config.names.feature_norms)
    if not 1 <= count <= _MAX_CAPTURED:
        raise ValueError(f"{source}: captured states must be 1 to {_MAX_CAPTURED}, got {count}")
    if config.kind == "mtp" and count != 1:
        raise ValueError(f"{source}: captured states of a layer for multi-token prediction must be 1, got {count}")
    if num_norms > 1 and num_norms != count:
        raise ValueError(f"{source}: captured states must be {num_norms}, one for each norm, got {count}")
