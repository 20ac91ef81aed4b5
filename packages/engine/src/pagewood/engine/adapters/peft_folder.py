"""Reads the folders in which PEFT stores adapters: adapter_config.json and adapter_model.safetensors.

The tensors say what an adapter changes, and the configuration how much; what contradicts the other is an error. Shapes
are compared with the model before a tensor is read, so a folder takes no more memory than an adapter of the largest
rank in every module, and one matrix of the model. Modules that are replaced as a whole (modules_to_save) become changes
of the rank that their difference from the model needs, if it is not too large. Pickled files are never read.

Legend: r rank, K inputs, N outputs of a module.
Source: Hu et al., LoRA, 2021; Kalajdzievski, rsLoRA, 2023; Liu et al., DoRA, 2024; Greenewald et al.,
Activated LoRA, 2025.
"""

# pyright: basic
# safetensors has no types.

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from pagewood.engine.adapters.low_rank import AdapterWeights, Change, low_rank_of
from pagewood.engine.adapters.modules import DOWN, GATE_UP, ExpertStack, ModelModules
from pagewood.engine.adapters.peft_config import PeftConfig
from pagewood.engine.api import MAX_ADAPTER_RANK
from pagewood.engine.models.families.stored_layout import Place

TENSORS = "adapter_model.safetensors"
Float32 = NDArray[np.float32]
_PREFIX = "base_model.model."
_A, _B, _BIAS_OF_B, _MAGNITUDE, _BIAS = (
    "lora_A.weight", "lora_B.weight", "lora_B.bias", "lora_magnitude_vector", "base_layer.bias",
)  # fmt: skip
_ROWS, _COPY = "token_adapter.trainable_tokens_delta", "base_layer.weight"
_WHOLE, _WHOLE_BIAS = "weight", "bias"
_OF_EMBEDDINGS: Mapping[str, str] = MappingProxyType({"lora_embedding_A": _A, "lora_embedding_B": _B})
_KINDS = (_A, _B, _BIAS_OF_B, _MAGNITUDE, _BIAS, _ROWS, _COPY, *_OF_EMBEDDINGS, _WHOLE, _WHOLE_BIAS)
_INNER = ".base_layer"
"""End of the name of a module inside of one that changes it."""
_ENDS = ("model.embed_tokens", "lm_head")
_DTYPES = ("F32", "BF16", "F16")


def read_adapter(folder: Path, model: ModelModules, *, max_rank: int) -> AdapterWeights:
    """Read an adapter for a model.

    Args:
        folder: of the adapter.
        model: that it changes.
        max_rank: the largest rank that is allowed, also of the difference of a module that is replaced as a whole.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged, does not fit the model, or needs something that is not supported.
    """
    config = PeftConfig.from_folder(folder, max_rank=min(max_rank, MAX_ADAPTER_RANK))
    path = folder / TENSORS
    if not path.is_file():
        raise FileNotFoundError(f"{folder} must have {TENSORS}, which is not there; pickled weights are not read")
    try:
        with safe_open(path, framework="pt") as file:
            return _Reader(path, file, config, model, max_rank).read()
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from error


class _Reader:
    """Reads one file."""

    __slots__ = ("_config", "_file", "_is_bound", "_max_rank", "_model", "_path")

    def __init__(self, path: Path, file: safe_open, config: PeftConfig, model: ModelModules, max_rank: int) -> None:
        self._max_rank = max_rank
        self._path = path
        self._file = file
        self._config = config
        self._is_bound = False  # written by: noting
        self._model = replace(model, numbers=self._noting(model.numbers), biases=self._noting(model.biases))

    def read(self) -> AdapterWeights:
        found: dict[str, dict[str, str]] = {}
        for name in iter(self._file.keys()):
            module, kind = self._split(name)
            found.setdefault(module, {})[kind] = name
        if not found:
            raise ValueError(f"{self._path} must have tensors, got none")
        if self._config.tokens and not any(_ROWS in names for names in found.values()):
            raise ValueError(f"{self._path}: {_ROWS} must be there, by trainable_token_indices of its configuration")
        self._check_saved(found)
        self._check_parameters()
        changes: dict[str, Change] = {}
        for module, names in found.items():
            for name, change in self._read(module, names).items():
                if name in changes:
                    raise ValueError(f"{self._path}: {module} must be the only change of {name}")
                changes[name] = change
        return AdapterWeights(changes=changes, invocation=self._config.invocation, is_bound=self._is_bound)

    def _noting(self, read: Callable[[str], Float32]) -> Callable[[str], Float32]:
        """Return the function that also notes that it was called."""

        def noted(name: str) -> Float32:
            self._is_bound = True
            return read(name)

        return noted

    def _check_saved(self, found: Mapping[str, Mapping[str, str]]) -> None:
        """Check that the modules with whole matrices are those that the configuration lists."""
        whole = [module for module, names in found.items() if _WHOLE in names or _WHOLE_BIAS in names]
        for module in whole:
            if not any(_is_end(module, one) for one in self._config.saved):
                raise ValueError(f"{self._path}: modules_to_save must name {module[:200]}, which has a whole matrix")
        for one in self._config.saved:
            if not any(_is_end(module, one) for module in whole) and any(
                _is_end(module, one) for module in self._model.modules
            ):
                raise ValueError(f"{self._path}: {one} of modules_to_save must have a whole matrix, got none")

    def _check_parameters(self) -> None:
        """Check that the configuration lists parameters of experts of this model only."""
        known = [f"{stack}.{one}" for stack in self._model.stacks for one in (GATE_UP, DOWN)]
        for one in self._config.parameters:
            if self._model.stack(one.rpartition(".")[0]) is None and not any(_is_end(name, one) for name in known):
                raise ValueError(
                    f"{self._config.fields.source}: target_parameters must be {GATE_UP} and {DOWN} of experts of the "
                    f"model, got {one[:200]!r}"
                )

    def _split(self, name: str) -> tuple[str, str]:
        """Return the module of a tensor and its kind."""
        own = name.removeprefix(_PREFIX).removesuffix(".weight" if name.endswith(f"{_MAGNITUDE}.weight") else "")
        for kind in _KINDS:
            if own.endswith(f".{kind}"):
                return own.removesuffix(f".{kind}"), _OF_EMBEDDINGS.get(kind, kind)
        raise ValueError(f"{self._path}: {name[:200]} is not a tensor of a supported kind")

    def _read(self, module: str, names: Mapping[str, str]) -> dict[str, Change]:
        """Return the changes by the modules that a stored one holds."""
        stack = self._model.stack(module.removesuffix(_INNER))
        if stack is not None:
            return self._of_experts(module, names, stack)
        places = self._model.places(module)
        if not places:
            raise ValueError(f"{self._path}: {module[:200]} is not a module of the model that an adapter may change")
        [end, *_] = places
        if end in _ENDS and _COPY in names:  # a copy of the model's own weights
            own = self._model.modules[end]
            shape = (own.inputs, own.outputs) if own.takes_tokens else (own.outputs, own.inputs)
            self._array(names[_COPY], *shape)
            names = {kind: name for kind, name in names.items() if kind != _COPY}
        if _ROWS in names and end == _ENDS[0]:
            if len(names) > 1:
                raise ValueError(f"{self._path}: {_ROWS} must be the only change of {module}, got {', '.join(names)}")
            return self._replaced_rows(end, names[_ROWS])
        for kind, why in ((_ROWS, "trainable_token_indices"), (_COPY, "modules_to_save")):
            if kind in names:
                raise ValueError(f"{self._path}: {why} must not name {module}, which is not supported")
        if end == _ENDS[0] and self._config.ties_ends:
            where = "modules_to_save" if _WHOLE in names else "target_modules"
            raise ValueError(f"{self._path}: ensure_weight_tying must be false with {module} in {where}")
        if _WHOLE in names or _WHOLE_BIAS in names:
            return self._replaced(module, names, places)
        return self._changes(module, names, places)

    def _replaced_rows(self, embedding: str, name: str) -> dict[str, Change]:
        """Return what replaces the rows of some tokens, also in an output projection with the same table."""
        own, tokens = self._model.modules[embedding], self._config.tokens
        if tokens and max(tokens) >= own.inputs:
            raise ValueError(f"{self._path}: trainable_token_indices must be below {own.inputs}, got {max(tokens)}")
        rows = self._array(name, len(tokens), own.outputs) - self._model.numbers(embedding)[list(tokens)]
        chosen = np.zeros((len(tokens), own.inputs), np.float32)
        chosen[np.arange(len(tokens)), list(tokens)] = 1
        changes = {embedding: Change(a=chosen, b=np.ascontiguousarray(rows.T))}
        if self._model.modules[_ENDS[1]].table == embedding:
            changes[_ENDS[1]] = Change(a=rows, b=np.ascontiguousarray(chosen.T))
        return changes

    def _replaced(self, module: str, names: Mapping[str, str], places: Mapping[str, Place]) -> dict[str, Change]:
        """Return what replaces a module as a whole: its difference from the model's."""
        if others := names.keys() - {_WHOLE, _WHOLE_BIAS}:
            raise ValueError(f"{self._path}: {_WHOLE} must be the only change of {module}, got {sorted(others)[0]} too")
        if _WHOLE not in names:
            raise ValueError(f"{self._path}: {_WHOLE} of {module} must be there, by modules_to_save, got its bias only")
        model = self._model
        shapes = [model.modules[name] for name in places]
        inputs, outputs, takes_tokens = shapes[0].inputs, sum(one.outputs for one in shapes), shapes[0].takes_tokens
        is_turned = takes_tokens or (model.stored.has_inputs_first and module not in _ENDS)
        whole = self._array(names[_WHOLE], *((inputs, outputs) if is_turned else (outputs, inputs)))
        whole = whole.T if is_turned else whole
        bias = self._array(names[_WHOLE_BIAS], outputs) if _WHOLE_BIAS in names else None
        changes: dict[str, Change] = {}
        for name, place in places.items():
            own = model.numbers(name)
            difference = model.rows(whole, place) - (own.T if takes_tokens else own)
            factors = low_rank_of(difference, self._max_rank)
            if factors is None:
                raise ValueError(
                    f"{self._path}: modules_to_save must not name {module}, whose difference from the model, "
                    f"{difference.shape[0]} x {difference.shape[1]}, is not of a rank of at most {self._max_rank}"
                )
            added = None
            if bias is not None:
                added = model.rows(bias, place) - (model.biases(name) if model.modules[name].has_bias else 0)
            a, b = factors
            changes[name] = Change(a=a, b=b, bias=None if added is None or not added.any() else added)
        return changes

    def _of_experts(self, module: str, names: Mapping[str, str], stack: ExpertStack) -> dict[str, Change]:
        """Return the changes of a parameter with the matrices `[N, K]` of all E experts.

        A is `[E r, K]`, expert by expert, and B `[N, r E]`, of whose columns E that follow each other are of E experts.
        PEFT names a second parameter of the module like the first, inside of it; shapes tell which is which, as none
        fit both. Where PEFT takes outputs for inputs, A and B have each other's places.
        """
        if names.keys() != {_A, _B}:
            raise ValueError(f"{self._path}: {module[:200]} must have {_A} and {_B} only, got {sorted(names)}")
        a_shape, b_shape = (tuple(self._file.get_slice(names[one]).get_shape()) for one in (_A, _B))
        for parameter in (GATE_UP, DOWN):
            own = self._model.modules[stack.modules(0, parameter)[0]]
            inputs, outputs = own.inputs, own.outputs * (2 if parameter == GATE_UP else 1)
            ends = a_shape[-1:], b_shape[:1]
            is_turned = ends == ((outputs,), (inputs,)) != ((inputs,), (outputs,))
            if is_turned or ends == ((inputs,), (outputs,)):
                break
        else:
            raise ValueError(
                f"{self._path}: {module[:200]} must have shapes that fit {GATE_UP} or {DOWN} of experts, got "
                f"{a_shape} and {b_shape}"
            )
        name = f"{module.removesuffix(_INNER)}.{parameter}"
        self._config.check_parameter(name)
        rank, scale = self._config.rank_of(name), np.float32(self._config.scale_of(name))
        a_size, b_size = (outputs, inputs) if is_turned else (inputs, outputs)
        a = self._array(names[_A], stack.count * rank, a_size).reshape(stack.count, rank, a_size)
        b = scale * self._array(names[_B], b_size, rank * stack.count).reshape(b_size, rank, stack.count)
        changes: dict[str, Change] = {}
        for expert in range(stack.count):
            own_a, own_b = a[expert], np.ascontiguousarray(b[:, :, expert])
            if is_turned:
                own_a, own_b = np.ascontiguousarray(own_b.T), np.ascontiguousarray(own_a.T)
            modules = stack.modules(expert, parameter)
            # beside biases the rows of the gate and of the other projection take turns, see `fused_experts`
            parts = [own_b[i::2] for i in range(2)] if own.has_bias else np.split(own_b, len(modules))
            for one, part in zip(modules, parts if parameter == GATE_UP else [own_b], strict=True):
                changes[one] = Change(a=own_a, b=part)
        return changes

    def _changes(self, module: str, names: Mapping[str, str], places: Mapping[str, Place]) -> dict[str, Change]:
        config, model = self._config, self._model
        config.check_target(module)
        for kind, needed, why in (
            (_A, True, "every module"),
            (_B, True, "every module"),
            (_MAGNITUDE, config.has_magnitudes, "use_dora"),
            (_BIAS_OF_B, config.has_bias, "lora_bias"),
        ):
            if (kind in names) != needed:
                rule = "must be there" if needed else "must not be there"
                raise ValueError(f"{self._path}: {kind} of {module} {rule}, by {why} of its configuration")
        if _BIAS in names and not config.replaces_bias:
            raise ValueError(f"{self._path}: {_BIAS} of {module} must not be there, by bias of its configuration")
        shapes = [model.modules[name] for name in places]
        rank, outputs, inputs = config.rank_of(module), sum(one.outputs for one in shapes), shapes[0].inputs
        a, b = self._array(names[_A], rank, inputs), self._array(names[_B], outputs, rank)
        magnitude, shift, bias = (
            None if kind not in names else self._array(names[kind], outputs) for kind in (_MAGNITUDE, _BIAS_OF_B, _BIAS)
        )
        scale, changes = np.float32(config.scale_of(module)), dict[str, Change]()
        for name, place in places.items():
            own_b = scale * model.rows(b, place)
            reads = model.modules[name].has_bias and (magnitude is not None or bias is not None)
            old = model.biases(name) if reads else np.zeros(len(own_b), np.float32)
            new = old if bias is None else model.rows(bias, place)
            added: Float32 = np.zeros(len(own_b), np.float32) if shift is None else scale * model.rows(shift, place)
            factors: Float32 | None = None
            if magnitude is not None:
                factors = model.rows(magnitude, place) / _norms(model.numbers(name), a, own_b)
                own_b, added, old = factors[:, None] * own_b, factors * added, factors * old
            added = (added + (new - old)).astype(np.float32)
            changes[name] = Change(a=a, b=own_b, factors=factors, bias=added if added.any() else None)
        return changes

    def _array(self, name: str, *shape: int) -> Float32:
        """Return a tensor as float32.

        Raises:
            ValueError: it has another shape or dtype, or numbers that are not finite.
        """
        header = self._file.get_slice(name)
        if tuple(header.get_shape()) != shape or header.get_dtype() not in _DTYPES:
            raise ValueError(
                f"{self._path}: {name} must have shape {shape} and one of the dtypes {', '.join(_DTYPES)}, got "
                f"{tuple(header.get_shape())} and {header.get_dtype()}"
            )
        array: Float32 = self._file.get_tensor(name).to(torch.float32).numpy()
        if not np.isfinite(array).all():
            raise ValueError(f"{self._path}: {name} must have finite numbers")
        return array


def _is_end(module: str, name: str) -> bool:
    return module == name or module.endswith(f".{name}")


def _norms(weights: Float32, a: Float32, b: Float32) -> Float32:
    """Return the norms `[N]` of the rows of `weights` `[N, K]` plus `b` `[N, r]` `a` `[r, K]`."""
    return np.linalg.norm(weights + b @ a, axis=1).astype(np.float32)
