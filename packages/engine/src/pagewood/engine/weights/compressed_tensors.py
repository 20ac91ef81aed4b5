"""compressed-tensors: groups of modules, each with a scheme of its own.

Source: the compressed-tensors library 0.20, which llm-compressor and vLLM use.
"""

from __future__ import annotations

from collections.abc import Callable

from pagewood.engine.json_fields import Fields
from pagewood.engine.weights.checkpoint_formats import Format
from pagewood.engine.weights.float4 import MXFP4, NVFP4
from pagewood.engine.weights.float8 import Float8
from pagewood.engine.weights.integers import Bytes, Packed, scales_of
from pagewood.engine.weights.names import Matches, module_pattern

_LARGEST_GROUP = 1 << 24
_FORMATS = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mxfp8-quantized",
)  # fmt: skip
_STRATEGIES = ("tensor", "channel", "group", "block")


def compressed_tensors_finder(fields: Fields) -> Callable[[str], Format | None]:
    """Return a function from the name of a linear module to its format; None: it is not quantised.

    Raises:
        ValueError: a scheme is not supported, or the configuration is not valid.
    """
    sparsity = fields.section("sparsity_config")
    if sparsity is not None and sparsity.text("format", "dense") != "dense":
        raise ValueError(f"{sparsity.source}: format must be dense, got {sparsity.text('format')!r}")
    if fields.section("transform_config") is not None:
        raise ValueError(f"{fields.source}: transform_config must be absent, activations are not transformed")
    status = fields.text("quantization_status", "compressed")
    if status != "compressed":
        raise ValueError(f"{fields.source}: quantization_status must be compressed, got {status[:80]!r}")
    ignored = [module_pattern(name, fields.source, with_class=True) for name in fields.texts("ignore") or ()]
    groups = fields.section("config_groups") or fields.empty("config_groups")
    schemes: dict[str, tuple[Matches, Format | None]] = {}
    for name in groups.values:
        group = groups.section(name) or groups.empty(name)
        scheme = _format(fields, group)
        for target in group.texts("targets") or ():
            matches = module_pattern(target, group.source, with_class=True)
            schemes[target] = (matches, scheme)
    ordered = [schemes[target] for target in sorted(schemes, key=_place)]

    def find(module: str) -> Format | None:
        if any(matches(module) for matches in ignored):
            return None
        return next((scheme for matches, scheme in ordered if matches(module)), None)

    return find


def _place(target: str) -> tuple[int, str]:
    """Return the precedence of a target that matches a module: names, expressions by their text, the class."""
    return (1 if target.startswith("re:") else 2 if target == "Linear" else 0), target


def _format(fields: Fields, group: Fields) -> Format | None:
    weights = group.section("weights")
    if weights is None:
        return None
    name = group.text("format", fields.text("format", "naive-quantized"))
    if name not in _FORMATS:
        raise ValueError(f"{group.source}: format must be one of {', '.join(_FORMATS)}, got {name[:80]!r}")
    if weights.values.get("dynamic") not in (None, False):
        raise ValueError(f"{weights.source}: dynamic must be false, got {weights.values['dynamic']!r}")
    if name == "nvfp4-pack-quantized":
        return NVFP4(codes=".weight_packed", scales=".weight_scale", whole=".weight_global_scale", divides=True)
    if name == "mxfp4-pack-quantized":
        return MXFP4(codes=".weight_packed", scales=".weight_scale")
    if name == "mxfp8-quantized":
        return Float8(name=name, block=(1, 32), scale=".weight_scale", is_power=True)
    num_bits = weights.integer("num_bits", 8, low=1, high=8)
    strategy = weights.text("strategy", "tensor")
    if strategy not in _STRATEGIES:
        raise ValueError(f"{weights.source}: strategy must be one of {', '.join(_STRATEGIES)}, got {strategy[:80]!r}")
    size = weights.integer("group_size", low=1, high=_LARGEST_GROUP) if strategy == "group" else 0
    if weights.text("type", "int") == "float":
        return _float8(weights, name, num_bits, strategy, size)
    if strategy == "block":
        raise ValueError(f"{weights.source}: strategy must be tensor, channel or group for whole numbers, got block")
    scales = scales_of({"tensor": 0, "channel": -1}.get(strategy, size))
    is_symmetric = weights.flag("symmetric", True)
    if name == "pack-quantized":
        return Packed(num_bits=num_bits, scales=scales, is_symmetric=is_symmetric)
    zeros = "none" if is_symmetric else "stored"
    return Bytes(name=f"{name} with {num_bits} bits", num_bits=num_bits, scales=scales, zeros=zeros)


def _float8(weights: Fields, name: str, num_bits: int, strategy: str, size: int) -> Format:
    if num_bits != 8 or name == "pack-quantized":
        raise ValueError(f"{weights.source}: num_bits of type float must be 8 for {name}, got {num_bits}")
    block = {"tensor": None, "channel": (1, 0), "group": (1, size)}.get(strategy)
    if strategy == "block":
        sizes = weights.integers("block_structure", low=1, high=_LARGEST_GROUP)
        if len(sizes) != 2:
            raise ValueError(f"{weights.source}: block_structure must have 2 entries, got {len(sizes)}")
        block = (sizes[0], sizes[1])
    return Float8(name=name, block=block, scale=".weight_scale")
