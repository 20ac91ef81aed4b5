"""Keys and tensors that are read from GGUF files are those that the `gguf` package writes."""

# pyright: basic
# gguf is typed in part only.

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import gguf
import pytest

from pagewood.engine.weights.gguf import config, dense, hybrids, keys, mixtures, rope
from pagewood.engine.weights.gguf.architecture import MODULES
from pagewood.engine.weights.gguf.architectures import ARCHITECTURES

LEGACY = {"rope.scale_linear"}
"""Keys of files that converters wrote before the package had their names."""
UNREAD = {"attn_rot_embd", "rope_freqs", "rope_factors_long", "rope_factors_short", "attn_k_b", "attn_v_b", "dense_2"}
"""Tensors that are read by rules of their own, or refused."""
OUTSIDE = {
    "token_embd", "position_embd", "output_norm", "output", "per_layer_token_embd", "per_layer_model_proj",
    "per_layer_proj_norm", "token_embd_norm",
}  # fmt: skip
NUMBERS = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
SIZES = {
    "model_type": "", "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
}  # fmt: skip
"""What modules follow from."""
NEWER = {"mistral", "deepseek32"}
"""Architectures that the package does not have yet."""


def _written(space: type = gguf.Keys) -> Iterator[str]:
    """Yield the keys of architectures, without the name."""
    for name, value in vars(space).items():
        if isinstance(value, type) and not name.startswith("_"):
            yield from _written(value)
        elif isinstance(value, str) and value.startswith("{arch}."):
            yield value.removeprefix("{arch}.")


WRITTEN = set(_written())


def test_keys_exist() -> None:
    assert len(WRITTEN) > 100
    named = {*keys._READ, *keys._WITHOUT_EFFECT, *keys._OF_EXPERTS, *keys._ONE, *keys._ZERO}
    asked = {
        key
        for module in (config, dense, hybrids, mixtures)
        for key in re.findall(r'keys\.(?!has_)\w+\(\s*"([\w.]+)"', inspect.getsource(module))
    }
    assert len(asked) > 30
    stretching = {f"rope.scaling.{key}" for key in re.findall(r"\{own\}([a-z_]{6,})", inspect.getsource(rope))}
    assert named | asked | stretching - {"rope.scaling.yarn_"} <= WRITTEN | LEGACY


@pytest.mark.parametrize("name", sorted(ARCHITECTURES.keys() - NEWER))
def test_every_tensor_has_a_place(name: str) -> None:
    own = ARCHITECTURES[name]
    tensors = {gguf.TENSOR_NAMES[one].replace("blk.{bid}.", "") for one in gguf.MODEL_TENSORS[NUMBERS[name]]}
    modules = {module.removesuffix(".scale") for module in own.modules}
    assert modules <= tensors | MODULES.keys() | _extra_layers(name)
    nextn = {tensor for tensor in tensors if tensor.startswith("nextn.")}
    assert tensors - UNREAD - OUTSIDE - nextn <= own.all_modules(SIZES).keys()


def _extra_layers(name: str) -> set[str]:
    """Return the tensors of layers for multi-token prediction, which newer packages have for `deepseek2`."""
    if name != "deepseek2":
        return set()
    return {one.replace("blk.{bid}.", "") for one in gguf.TENSOR_NAMES.values() if ".nextn." in one}


def test_functions_of_routers_have_their_numbers() -> None:
    assert (mixtures._SOFTMAX, mixtures._SIGMOID) == (
        gguf.ExpertGatingFuncType.SOFTMAX,
        gguf.ExpertGatingFuncType.SIGMOID,
    )
