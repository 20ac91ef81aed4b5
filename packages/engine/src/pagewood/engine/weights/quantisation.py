"""The quantisation of a folder's matrices, from `quantization_config` in config.json."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from pagewood.engine.json_fields import Fields, check_same
from pagewood.engine.weights.awq import AWQ
from pagewood.engine.weights.checkpoint_formats import Format
from pagewood.engine.weights.compressed_tensors import compressed_tensors_finder
from pagewood.engine.weights.float4 import MXFP4, NVFP4
from pagewood.engine.weights.float8 import Float8
from pagewood.engine.weights.gptq import GPTQ
from pagewood.engine.weights.names import Matches, module_pattern, within
from pagewood.engine.weights.torchao import torchao_formats

METHODS = ("gptq", "awq", "compressed-tensors", "fp8", "fbgemm_fp8", "mxfp4", "modelopt", "torchao")
_LARGEST_GROUP = 1 << 24
_OF_ACTIVATIONS = (
    ".input_scale", ".input_zero_point", ".input_global_scale", ".output_scale", ".output_zero_point", ".q_scale",
    ".k_scale", ".v_scale", ".input_scale_ub",
)  # fmt: skip
Find = Callable[[str], Format | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantisation:
    """The quantised matrices of a folder, and their formats."""

    method: str
    find: Find
    """Function from the name of a linear module to its format; None: it is not quantised."""

    def format_of(self, tensor: str) -> Format | None:
        """Return the format of a matrix by its name, as in "model.layers.0.mlp.up_proj.weight"; None: plain numbers."""
        module = tensor.removesuffix(".weight")
        if module == tensor or module.endswith("embed_tokens"):
            return None
        return self.find(module)

    def is_unneeded(self, tensor: str) -> bool:
        """Whether a tensor scales activations or keys and values, which are computed without it here."""
        return tensor.endswith(_OF_ACTIVATIONS)


def check_method(fields: Fields) -> str | None:
    """Return the method of a config.json, or None if its matrices are plain numbers.

    Raises:
        ValueError: the method is not supported.
    """
    section = fields.section("quantization_config")
    if section is None:
        return None
    method = section.text("quant_method", "none")
    if method not in METHODS:
        raise ValueError(f"{section.source}: quant_method must be one of {', '.join(METHODS)}, got {method[:80]!r}")
    return method


def read_quantisation(folder: Path, names: Collection[str], metadata: Mapping[str, str]) -> Quantisation | None:
    """Return the quantisation of the matrices of a folder; None: plain numbers.

    Args:
        folder: its config.json is read; without one there is no quantisation.
        names: of all tensors.
        metadata: of the headers of all safetensors.

    Raises:
        ValueError: the method or one of its features is not supported; or a field is missing or wrong.
    """
    file = folder / "config.json"
    if not file.is_file():
        return None
    fields = Fields.from_file(file)
    method = check_method(fields)
    if method is None:
        return None
    section = fields.section("quantization_config")
    assert section is not None
    return Quantisation(method=method, find=_finder(method, section, names, metadata))


def _finder(method: str, fields: Fields, names: Collection[str], metadata: Mapping[str, str]) -> Find:
    match method:
        case "gptq":
            return _gptq(fields)
        case "awq":
            return _except(fields, _awq(fields), "modules_to_not_convert")
        case "compressed-tensors":
            return compressed_tensors_finder(fields)
        case "fp8":
            return _except(fields, _fp8(fields, names), "modules_to_not_convert", "ignored_layers")
        case "fbgemm_fp8":
            scales = Float8(name=method, block=(1, 0), scale=".weight_scale")
            return _except(fields, scales, "modules_to_not_convert")
        case "mxfp4":
            return _except(fields, MXFP4(), "modules_to_not_convert")
        case "modelopt":
            return _except(fields, _modelopt(fields), "ignore", "exclude_modules")
        case _:
            return torchao_formats(metadata, fields.source).get


def _except(fields: Fields, form: Format, *lists: str) -> Find:
    """Return `form` for every module except the output projection and those that a list names.

    Raises:
        ValueError: two names of the list are present and differ.
    """
    said = [(name, sorted(set(texts))) for name in lists if (texts := fields.texts(name)) is not None]
    check_same(fields.source, said)
    excluded = [within(text) for _, texts in said for text in texts]
    return lambda module: None if module == "lm_head" or any(matches(module) for matches in excluded) else form


def _gptq(fields: Fields) -> Find:
    is_v2 = _is_gptq_v2(fields)

    def form(own: Fields) -> GPTQ:
        group = _group(own, "group_size", fallback=fields)
        num_bits = own.integer("bits", fields.integer("bits", low=2, high=8), low=2, high=8)
        try:
            is_symmetric = own.flag("sym", fields.flag("sym", False))
            return GPTQ(num_bits=num_bits, group=group, is_v2=is_v2, is_symmetric=is_symmetric)
        except ValueError as error:
            raise ValueError(f"{own.source}: {error}") from error

    plain = form(fields)
    has_head = fields.flag("lm_head", False)
    rules: list[tuple[Matches, Format | None]] = []
    dynamic = fields.section("dynamic") or fields.empty("dynamic")
    for pattern in dynamic.values:  # "+:" or nothing: other numbers; "-:": not quantised
        matches = module_pattern("re:" + pattern.removeprefix("+:").removeprefix("-:"), dynamic.source)
        own = None if pattern.startswith("-:") else form(dynamic.section(pattern) or dynamic.empty(pattern))
        rules.append((matches, own))
    inside = fields.values.get("modules_in_block_to_quantize")
    chosen = [within(name) for name in _flat(inside, fields)]

    def find(module: str) -> Format | None:
        if module == "lm_head" and not has_head:
            return None
        for matches, own in rules:
            if matches(module):
                return own
        if chosen and not any(matches(module) for matches in chosen):
            return None
        return plain

    return find


def _is_gptq_v2(fields: Fields) -> bool:
    """Return whether zeros are stored unchanged, from `checkpoint_format`, whose later name is `format`.

    Raises:
        ValueError: the layout is unknown, or both fields are present and differ.
    """
    labels = {
        name: fields.text(name) for name in ("checkpoint_format", "format") if fields.values.get(name) is not None
    }
    for name, label in labels.items():
        if label not in ("gptq", "gptq_v2"):
            raise ValueError(f"{fields.source}: {name} must be gptq or gptq_v2, got {label[:80]!r}")
    if fields.flag("is_marlin_format", False):
        raise ValueError(f"{fields.source}: checkpoint_format must be gptq or gptq_v2, got 'marlin'")
    check_same(fields.source, list(labels.items()))
    return "gptq_v2" in labels.values()


def _flat(value: object, fields: Fields) -> list[str]:
    """Return the strings of a list of lists of strings."""
    if value is None:
        return []
    lists = cast("list[object]", value) if isinstance(value, list) else [value]
    items = [item for one in lists for item in (cast("list[object]", one) if isinstance(one, list) else [one])]
    if not all(isinstance(item, str) for item in items):
        raise ValueError(f"{fields.source}: modules_in_block_to_quantize must be lists of strings, got {items!r:.80}")
    return cast("list[str]", items)


def _awq(fields: Fields) -> AWQ:
    for names in (("bits", "w_bit"), ("group_size", "q_group_size"), ("version", "format")):
        check_same(fields.source, [(name, _folded(fields.values.get(name))) for name in names])
    num_bits = fields.integer("bits", fields.integer("w_bit", 4, high=64), high=64)
    if num_bits != 4:
        raise ValueError(f"{fields.source}: bits must be 4 for awq, got {num_bits}")
    version = fields.text("version", fields.text("format", "gemm")).lower()
    if version != "gemm":
        raise ValueError(f"{fields.source}: version must be gemm for awq, got {version[:80]!r}")
    if not fields.flag("zero_point", True):
        raise ValueError(f"{fields.source}: zero_point must be true for awq, got False")
    name = "group_size" if fields.values.get("q_group_size") is None else "q_group_size"
    return AWQ(group=_group(fields, name))


def _folded(value: object) -> object:
    """Return a text in small letters, and other values as they are."""
    return value.lower() if isinstance(value, str) else value


def _fp8(fields: Fields, names: Collection[str]) -> Float8:
    block = fields.integers("weight_block_size", low=1, high=_LARGEST_GROUP)
    if len(block) not in (0, 2):
        raise ValueError(f"{fields.source}: weight_block_size must have 2 entries, got {len(block)}")
    number = fields.text("fmt", "e4m3")
    if number not in ("e4m3", "float8_e4m3fn"):
        raise ValueError(f"{fields.source}: fmt must be e4m3, got {number[:80]!r}")
    is_inverse = any(name.endswith(".weight_scale_inv") for name in names)  # in name only: values are multiplied
    scale = ".weight_scale_inv" if block or is_inverse else ".weight_scale"
    return Float8(name="fp8", block=(block[0], block[1]) if block else None, scale=scale)


def _modelopt(fields: Fields) -> Format:
    algorithm = fields.text("quant_algo", "none")
    match algorithm.upper():
        case "FP8":
            return Float8(name="modelopt FP8", block=None, scale=".weight_scale")
        case "NVFP4":
            return NVFP4(codes=".weight", scales=".weight_scale", whole=".weight_scale_2", divides=False)
        case _:
            raise ValueError(f"{fields.source}: quant_algo must be FP8 or NVFP4, got {algorithm[:80]!r}")


def _group(fields: Fields, name: str, *, fallback: Fields | None = None) -> int:
    """Return a number of inputs that share a scale; -1: all."""
    if fields.values.get(name) is None and fallback is not None:
        fields = fallback
    if fields.values.get(name) == -1:
        return -1
    return fields.integer(name, 128, low=1, high=_LARGEST_GROUP)
