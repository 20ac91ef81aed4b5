"""The machine of a replica: the duration of its steps, the KV that it holds, and a file format for both."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

from pagewood.schedpolicy.counts import require_count
from pagewood.schedpolicy.steps.latency import StepModel, StepSample

FORMAT = "pagewood-step-model/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A step model with a name.

    The model is linear on purpose: a few measured steps determine its coefficients, and sums over many steps have a
    closed form. It leaves out the lower efficiency of kernels at odd sizes, and without `pair_s` the quadratic part of
    a prompt's attention too.

    Attributes:
        name: Name of the machine and the model.
        source: Source of the numbers.
        model: Duration of a step.
        kv_tokens: Tokens of KV that fit, >= 0; 0 if unknown.
    """

    name: str
    source: str
    model: StepModel
    kv_tokens: int = 0

    def __post_init__(self) -> None:
        require_count("kv_tokens", self.kv_tokens, least=0)
        if not self.model.base_s + self.model.decode_s > 0:
            raise ValueError("base_s + decode_s must be > 0, got 0")

    def decode_s(self, num_steps: int, num_decode: int, num_kv: int) -> float:
        """Return the duration of `num_steps` steps in which the same requests decode, and nothing else happens.

        Args:
            num_steps: Number of steps, >= 0.
            num_decode: Requests that decode.
            num_kv: Tokens of KV that the first step reads; each later step reads `num_decode` more.
        """
        model = self.model
        total_kv = num_steps * num_kv + num_decode * (num_steps * (num_steps - 1) // 2)
        return num_steps * (model.base_s + model.decode_s * num_decode) + model.kv_s * total_kv

    def num_decode_steps(self, within_s: float, num_decode: int, num_kv: int, *, at_most: int) -> int:
        """Return the smallest number of such steps that takes at least `within_s`, but not more than `at_most`."""
        low, high = 0, at_most
        while low < high:
            middle = (low + high) // 2
            if self.decode_s(middle, num_decode, num_kv) >= within_s:
                high = middle
            else:
                low = middle + 1
        return low


def load_machine(path: str | Path) -> Machine:
    """Read a machine from a JSON file, which the benchmark of an engine can write.

    The file is an object with `"format": "pagewood-step-model/1"`, optionally `name`, `source` and `kv_tokens`, and
    either the coefficients (the fields of `StepModel`, `pair_s` if there is one) or `samples`: measured steps (objects
    with the fields of `StepSample`, `num_pairs` if they were counted), from which `StepModel.fitted` computes the
    coefficients, with the least relative error.

    Raises:
        ValueError: The file does not have this form; the message names the place.
        OSError: The file cannot be read.
    """
    path = Path(path)
    try:
        value: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} must be JSON: {error}") from None
    if not isinstance(value, dict) or cast("dict[str, Any]", value).pop("format", None) != FORMAT:
        raise ValueError(f'{path} must be a JSON object with "format": "{FORMAT}"')
    content = cast("dict[str, Any]", value)
    try:
        name, source = content.pop("name", path.stem), content.pop("source", path.name)
        kv_tokens = content.pop("kv_tokens", 0)
        if not isinstance(kv_tokens, int):
            raise ValueError(f"kv_tokens must be an integer, got {kv_tokens!r}")
        return Machine(name=str(name), source=str(source), model=_model(content), kv_tokens=kv_tokens)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _model(content: Mapping[str, Any]) -> StepModel:
    if "samples" not in content:
        return StepModel(**_numbers(content, {field.name for field in fields(StepModel)}, "pair_s", "the object"))
    samples: Any = content["samples"]
    if not isinstance(samples, list) or len(content) > 1:
        raise ValueError("samples must be a list and replace the coefficients")
    names = set(StepSample._fields)
    rows = enumerate(cast("list[Any]", samples))
    measured = [StepSample(**_numbers(sample, names, "num_pairs", f"samples[{index}]")) for index, sample in rows]
    return StepModel.fitted(measured, relative=True)


def _numbers(value: object, names: set[str], optional: str, where: str) -> dict[str, Any]:
    """Check that an object has exactly these fields, all of them numbers, and return it; one of them may be absent."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} must be an object, got {value!r:.80}")
    given = cast("Mapping[str, Any]", value)
    if set(given) | {optional} != names:
        needed = ", ".join(sorted(names - {optional}))
        raise ValueError(f"{where} must have {needed}, perhaps {optional}, and nothing else, got {', '.join(given)}")
    for name, item in given.items():
        if isinstance(item, bool) or not isinstance(item, (int, float)):
            raise ValueError(f"{where}: {name} must be a number, got {item!r:.80}")
    return dict(given)
