"""Describes the folder or GGUF file of a model: its content, its memory, and the errors from rounding its weights.

Legend: N outputs, K inputs of a matrix.
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np
import torch
from numpy.typing import NDArray

from pagewood.engine.api import ActivationFormat, EngineConfig, Progress, WeightFormat
from pagewood.engine.core.memory.page_groups import num_frames_needed
from pagewood.engine.json_fields import Fields
from pagewood.engine.model_folder.folder import model_folder, model_name
from pagewood.engine.model_folder.load import Fused, open_matrices
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.expert_division import divided_by_expert
from pagewood.engine.models.shard import Shard
from pagewood.engine.models.stored.checkpoint import Checkpoint
from pagewood.engine.models.stored.checkpoint_files import checkpoint_files
from pagewood.engine.runner.cpu.compiled.products.weight_kind import WeightKind
from pagewood.engine.runner.cpu.weights.packer import Packer, packed_bytes, rounded
from pagewood.engine.text import Tokenizer
from pagewood.engine.weights.matrix_forms import BFloat16, Float16, Float32, Weight, to_bfloat16
from pagewood.engine.weights.nearest import joined

_PAGE = 16
_KV_DTYPES = ("float32", "int8")
"""The dtypes that the KV memory of a model can have on a CPU."""
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
_NUM_INPUTS = 16
_SLICE = 1 << 22  # numbers that are rounded at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMatrices:
    """Matrices that are stored in one way and loaded in one form."""

    stored: str
    """As in "BF16" or "gguf Q4_K"."""
    loaded: str
    """With weights="auto", as in "bfloat16" or "int4 in groups of 32"."""
    why: str
    """Why the form is not smaller; empty: the form holds the stored numbers exactly."""
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSummary:
    """The parts of a folder that handle text."""

    kind: str
    """As tokenizer.json names it, as in "BPE"."""
    num_tokens: int
    num_special: int
    end_tokens: Sequence[str]
    has_chat_template: bool
    has_response_template: bool
    """Whether a template finds reasoning and calls of tools in answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixError:
    """The errors of a matrix from rounding."""

    name: str
    shape: tuple[int, int]
    weight_error: float
    """Norm of the error over the norm of the weights."""
    output_error: float
    """The same for outputs with random inputs of length 1, which are rounded too if the form computes with codes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """A model on disk."""

    name: str
    kind: str
    """folder or GGUF."""
    files: Sequence[tuple[str, int]]
    """Name and bytes of each file with weights."""
    model: ModelConfig
    num_parameters: int
    num_active_parameters: int
    """Those that a token uses: without the experts that it does not choose."""
    matrices: Sequence[StoredMatrices]
    tensor_parallel_size: int
    """Ranks that divide the model; the memory below is that of rank 0."""
    weights_bytes: dict[str, int]
    """Memory of all weights on a CPU, by form; quantised matrices keep their form, except for float32."""
    kv_bytes_per_token: dict[str, int]
    """Bytes of a token's KV in all layers, by the dtype of the KV memory."""
    kv_bytes_of_longest: dict[str, int]
    """The most that the longest text takes on a CPU while it runs alone; layers with a window keep its last part."""
    tokenizer: TokenizerSummary | None
    """None: the folder has no tokenizer."""
    form: str | None = None
    """The form of `errors`."""
    activations: ActivationFormat = "auto"
    """The format of the inputs of its products."""
    errors: Sequence[MatrixError] = ()
    """Worst outputs first; already quantised matrices are left out, because they stay unchanged."""


def inspect_model(
    model: str | Path | None,
    *,
    form: WeightFormat | None = None,
    activations: ActivationFormat = "auto",
    tensor_parallel_size: int = 1,
    expert_parallel: bool = False,
    expert_map: str | None = None,
    progress: Progress | None = None,
) -> Inspection:
    """Return the description of a folder or a GGUF file.

    Only headers are read, except for quantised matrices, whose form depends on their numbers, and with `form`.

    Args:
        model: a folder or a GGUF file; None: the embedded model.
        form: of weights; the errors from rounding to it are computed for every matrix.
        activations: the inputs of these errors are rounded as `EngineConfig.activations` says.
        tensor_parallel_size: ranks that divide the model.
        expert_parallel: whether they divide experts as wholes; see `EngineConfig`.
        expert_map: file that says how; None: consecutive experts.
        progress: called for every projection.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the files are damaged, something in them is not supported, or the model cannot be divided so.
    """
    if form is not None and form not in get_args(WeightFormat):
        raise ValueError(f"form must be one of {', '.join(get_args(WeightFormat))}, got {form!r}")
    if activations not in get_args(ActivationFormat):
        raise ValueError(f"activations must be one of {', '.join(get_args(ActivationFormat))}, got {activations!r}")
    if activations == "bfloat16" and form not in ("auto", "bfloat16"):
        raise ValueError(f"activations must be auto or float32 unless form is auto or bfloat16, got {activations!r}")
    if tensor_parallel_size < 1:
        raise ValueError(f"tensor_parallel_size must be >= 1, got {tensor_parallel_size}")
    folder = model_folder(model)
    config = ModelConfig.from_folder(folder)
    if expert_parallel and tensor_parallel_size == 1:
        raise ValueError("expert_parallel must be False with tensor_parallel_size 1, got True")
    if expert_map is not None and not expert_parallel:
        raise ValueError(f"expert_map must be None without expert_parallel, got {expert_map!r}")
    if expert_parallel:
        file = None if expert_map is None else Path(expert_map)
        config = divided_by_expert(config, tensor_parallel_size, file=file)
    shard = Shard(0, tensor_parallel_size)
    rank, whole, checkpoint = config.for_shard(shard), Checkpoint(folder, dtype=None), Checkpoint(folder, dtype=None)
    all_matrices, fused = open_matrices(whole, config), open_matrices(checkpoint, config, shard=shard)
    elements_of_matrices = sum(math.prod(each.shape) for each in fused)
    sizes = dict.fromkeys(get_args(WeightFormat), 4 * (checkpoint.num_elements - elements_of_matrices))
    plain: dict[tuple[str, str], int] = {}
    errors: list[MatrixError] = []
    for number, each in enumerate(fused):
        loaded = _loaded(checkpoint, each, plain)
        for name in sizes:
            sizes[name] += packed_bytes(loaded, name)
        if progress:
            progress("reading weights", number + 1, len(fused))
    if form is not None:
        for each in all_matrices:
            errors += _errors(whole, each, Packer(form, activations=activations))
    errors.sort(key=lambda one: one.output_error, reverse=True)
    is_folder = model is None or Path(model).is_dir()
    return Inspection(
        name=model_name(model),
        kind="folder" if is_folder else "GGUF",
        files=[(path.name, path.stat().st_size) for path in map(Path.resolve, checkpoint_files(folder))],
        model=config,
        num_parameters=whole.num_elements,
        num_active_parameters=whole.num_elements - config.num_idle_parameters,
        matrices=[
            StoredMatrices(stored=stored, loaded=loaded, why=why, count=count)
            for (stored, loaded, why), count in sorted(
                [
                    *((key, count) for key, count in checkpoint.kept.items()),
                    *(((*key, ""), count) for key, count in plain.items()),
                ]
            )
        ],
        tensor_parallel_size=tensor_parallel_size,
        weights_bytes={str(name): size for name, size in sizes.items()},
        kv_bytes_per_token={dtype: _kv_bytes(rank, dtype) for dtype in _KV_DTYPES},
        kv_bytes_of_longest={dtype: _kv_bytes_of_longest(rank, dtype) for dtype in _KV_DTYPES},
        tokenizer=tokenizer_summary(folder, config.eos_token_ids),
        form=form,
        activations=activations,
        errors=errors,
    )


def _loaded(checkpoint: Checkpoint, fused: Fused, plain: dict[tuple[str, str], int]) -> torch.Tensor | Weight:
    """Return matrices as they are loaded: read if one is quantised, otherwise a tensor without memory."""
    if any(one.format is not None for one in fused.parts):
        for one in fused.parts:
            if one.format is None:
                _count(checkpoint, one.name, plain)
        return joined(checkpoint.read(fused.parts, fused.columns))
    dtypes = [_count(checkpoint, one.name, plain) for one in fused.parts]
    dtype = functools.reduce(torch.promote_types, dtypes)
    return torch.empty(fused.shape, dtype=dtype, device="meta")


def _count(checkpoint: Checkpoint, name: str, plain: dict[tuple[str, str], int]) -> torch.dtype:
    """Count a matrix of plain numbers; return its dtype."""
    stored = checkpoint.header(name)[1]
    dtype = _DTYPES.get(stored, torch.float32)
    loaded = "float32" if dtype == torch.float64 else str(dtype).removeprefix("torch.")
    plain[stored, loaded] = plain.get((stored, loaded), 0) + 1
    return dtype


def _errors(checkpoint: Checkpoint, fused: Fused, packer: Packer) -> list[MatrixError]:
    found: list[MatrixError] = []
    for one in fused.parts:
        if one.format is None:
            [weight] = checkpoint.read([one], fused.columns)
            found.append(_error(one.name, weight, packer))
    return found


def _error(name: str, weight: Weight, packer: Packer) -> MatrixError:
    """Compare a matrix of plain numbers with its rounded form, a few rows at a time."""
    rows, columns = weight.shape
    inputs = np.random.default_rng(0).standard_normal((_NUM_INPUTS, columns)).astype(np.float32)
    inputs /= np.linalg.norm(inputs, axis=1, keepdims=True)
    squares = np.zeros(4)  # weights, their errors, outputs, their errors
    step = max(1, _SLICE // columns)
    for start in range(0, rows, step):
        part = _tensor(weight, slice(start, start + step))
        exact = part.float().numpy()
        kind = packer.kind(part.dtype, columns)
        values = rounded(part, kind)
        wanted = exact @ inputs.T
        got = values @ _rounded_inputs(inputs, kind, packer.activations).T
        squares += [np.sum(np.square(one, dtype=np.float64)) for one in (exact, values - exact, wanted, got - wanted)]
    weight_error, output_error = np.sqrt(squares[1::2] / np.maximum(squares[::2], np.finfo(np.float64).tiny))
    return MatrixError(
        name=name, shape=(rows, columns), weight_error=float(weight_error), output_error=float(output_error)
    )


def _rounded_inputs(
    inputs: NDArray[np.float32], kind: WeightKind | None, activations: ActivationFormat
) -> NDArray[np.float32]:
    """Return inputs `[n, K]` as products with weights of this kind use them."""
    if kind == WeightKind.BFLOAT16_PAIRS:
        return to_bfloat16(inputs).dequantised()
    if kind is None or not kind.has_codes or activations == "float32":
        return inputs
    scales = np.abs(inputs).max(axis=1, keepdims=True) / np.float32(127)
    return np.rint(inputs / scales) * scales


def _tensor(weight: Weight, rows: slice) -> torch.Tensor:
    """Return rows of a matrix of plain numbers in its own dtype."""
    match weight:
        case BFloat16():
            return torch.from_numpy(weight.bits[rows].view(np.int16)).view(torch.bfloat16)
        case Float16() | Float32():
            values: NDArray[np.float16] | NDArray[np.float32] = weight.values[rows]
            return torch.from_numpy(values)
        case _:
            raise AssertionError(f"plain numbers are floating point, got {type(weight).__name__}")


def _kv_bytes(config: ModelConfig, dtype: str) -> int:
    layout = config.memory_layout(page_size=_PAGE, dtype=dtype, order="HND")
    return layout.bytes_per_page // _PAGE


def _kv_bytes_of_longest(config: ModelConfig, dtype: str) -> int:
    groups = config.groups(max_length=config.max_position)
    layout = config.memory_layout(page_size=_PAGE, dtype=dtype, order="HND", groups=groups)
    num_ahead = EngineConfig(device="cpu").max_chunk_tokens
    num_frames = num_frames_needed(groups.windows, config.max_position, page_size=_PAGE, num_ahead=num_ahead)
    return num_frames * layout.bytes_per_page


def tokenizer_summary(folder: Path, end_tokens: Sequence[int]) -> TokenizerSummary | None:
    """Describe the tokenizer of a folder whose model ends texts with `end_tokens`; None if it has no tokenizer."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    tokenizer = Tokenizer.from_folder(folder)
    model = Fields.from_file(file).section("model")
    special = tokenizer.special_tokens
    names = {number: text for text, number in special.items()}
    return TokenizerSummary(
        kind="unknown" if model is None else model.text("type", "unknown"),
        num_tokens=tokenizer.vocab_size,
        num_special=len(special),
        end_tokens=[names.get(token, str(token)) for token in end_tokens],
        has_chat_template=tokenizer.has_chat_template,
        has_response_template=tokenizer.response_template is not None,
    )
