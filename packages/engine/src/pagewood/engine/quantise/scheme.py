"""The scheme of rounded matrices, and its description in config.json for compressed-tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pagewood.engine.weights.matrix_forms import GROUPS

Method = Literal["nearest", "gptq"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """Signed codes with symmetric scales: int4 with a scale for each group of inputs, int8 with one for each output.

    Raises:
        ValueError: `group_size` does not fit the format.
    """

    format: Literal["int8", "int4"]
    group_size: int | None = None
    """Inputs that share a scale in int4: 32, 64 or 128; None: 32. In int8 it must be None."""
    method: Method = "nearest"
    """nearest: each number is rounded by itself. gptq: numbers that are rounded later compensate earlier errors."""

    def __post_init__(self) -> None:
        for name, known in (("format", ("int8", "int4")), ("method", ("nearest", "gptq"))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        if self.format == "int8" and self.group_size is not None:
            raise ValueError(
                f"group_size must be None for int8, whose scales are those of outputs, got {self.group_size}"
            )
        if self.format == "int4" and self.group_size is not None and self.group_size not in GROUPS:
            raise ValueError(f"group_size must be one of {', '.join(map(str, GROUPS))}, got {self.group_size}")

    @property
    def num_bits(self) -> int:
        """Bits of a code."""
        return 8 if self.format == "int8" else 4

    @property
    def lowest(self) -> int:
        """The least code."""
        return -127 if self.format == "int8" else -8

    @property
    def highest(self) -> int:
        """The largest code."""
        return 127 if self.format == "int8" else 7

    def group(self, inputs: int) -> int:
        """Return the inputs that share a scale in a matrix of `inputs` inputs."""
        return inputs if self.format == "int8" else self.group_size or GROUPS[0]

    def fits(self, inputs: int) -> bool:
        """Whether a matrix of `inputs` inputs can be stored in this scheme."""
        return inputs % self.group(inputs) == 0

    def configuration(self, ignored: Sequence[str]) -> dict[str, Any]:
        """Return `quantization_config`; `ignored` are the linear modules that stay unchanged.

        Engines that compute with int8 weights, ours included, want activations of int8 too, with a scale for each
        token.
        """
        is_int8 = self.format == "int8"
        name = "int-quantized" if is_int8 else "pack-quantized"
        weights: dict[str, Any] = {
            "num_bits": self.num_bits,
            "type": "int",
            "symmetric": True,
            "strategy": "channel" if is_int8 else "group",
            "group_size": None if is_int8 else self.group(0),
            "dynamic": False,
        }
        activations = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
        return {
            "quant_method": "compressed-tensors",
            "format": name,
            "quantization_status": "compressed",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": weights,
                    "input_activations": activations if is_int8 else None,
                    "output_activations": None,
                    "format": name,
                }
            },
            "ignore": list(ignored),
            "kv_cache_scheme": None,
        }
