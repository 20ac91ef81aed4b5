"""The fields of latent attentions."""

from __future__ import annotations

from pagewood.engine.json_fields import Fields, check_same
from pagewood.engine.models.families.family import Family
from pagewood.engine.models.fields.agreement import must_be
from pagewood.engine.models.fields.rope import MAX_POSITION, attention_multiplier, read_rope
from pagewood.engine.models.limits import read_size
from pagewood.engine.models.ops import LatentShape
from pagewood.engine.models.parts.latent_attention import LatentAttentionConfig
from pagewood.engine.models.parts.norm import NormConfig
from pagewood.engine.models.parts.rope import ProportionalScaling, RopeConfig

_NORM = NormConfig(epsilon=1e-6)
"""The norm of latents and of compressed queries. Its epsilon is fixed; `rms_norm_eps` is that of the other norms."""
_LARGEST_RANK = 1 << 16


def read_latent_attention(fields: Fields, family: Family) -> LatentAttentionConfig:
    """Return the attention of every layer.

    Raises:
        ValueError: see `read_layers`.
    """
    sizes = {
        name: read_size(fields, name, "head_dim") for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    }
    plain_dim, rope_dim = sizes["qk_nope_head_dim"], sizes["qk_rope_head_dim"]
    check_same(
        fields.source,
        [
            ("qk_head_dim", fields.values.get("qk_head_dim")),
            ("qk_nope_head_dim + qk_rope_head_dim", plain_dim + rope_dim),
        ],
    )
    shape = LatentShape(
        num_heads=read_size(fields, "num_attention_heads", "num_heads"),
        plain_dim=plain_dim,
        rope_dim=rope_dim,
        value_dim=sizes["v_head_dim"],
        rank=fields.integer("kv_lora_rank", low=1, high=_LARGEST_RANK),
        has_pairs=fields.flag("rope_interleave", True),
    )
    if family.rotated_layers == "none":
        must_be(fields, "mla_use_nope", True)
    query_rank, is_rotated = fields.values.get("q_lora_rank"), family.rotated_layers == "all"
    return LatentAttentionConfig(
        shape=shape,
        rope=read_rope(fields, family, head_dim=rope_dim) if is_rotated else _without_rotation(rope_dim),
        scale=(plain_dim + rope_dim) ** -0.5 * (attention_multiplier(fields) if is_rotated else 1.0),
        norm=_NORM,
        query_rank=None if query_rank is None else fields.integer("q_lora_rank", low=1, high=_LARGEST_RANK),
        has_bias=fields.flag("attention_bias", False),
        longest=fields.integer("index_topk", low=1, high=MAX_POSITION) if family.mixer == "indexed latents" else None,
    )


def _without_rotation(rope_dim: int) -> RopeConfig:
    """Return the rope of a head of which no pair is rotated, so that all attentions over latents are computed alike."""
    return RopeConfig(head_dim=rope_dim, theta=1e4, scaling=ProportionalScaling(num_pairs=0))
