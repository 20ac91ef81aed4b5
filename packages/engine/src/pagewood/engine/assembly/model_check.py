"""Compares a model as it is computed here with `transformers`: states after each layer, and logits of a runner.

Legend: T tokens, E hidden_size, V vocab_size, L layers.
"""

# pyright: basic
# torch and transformers are typed in part only.

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from pagewood.engine.api import EngineConfig
from pagewood.engine.assembly.available_memory import available_memory_bytes
from pagewood.engine.assembly.transformers.choice import reason_for_transformers
from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.core.messages.sampling_table import SamplingArrays
from pagewood.engine.model_folder.folder import model_folder, model_name
from pagewood.engine.model_folder.load import load_model
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.torch_ops import TorchOps, WholeTexts
from pagewood.engine.models.torch_recurrence import WholeTextStates
from pagewood.engine.runner.storage import storage_for
from pagewood.engine.weights.gguf.folder import is_gguf
from pagewood.kvpool.memory import allocate

Number = Literal["float32", "bfloat16", "float16"]
TOLERANCES: dict[Number, float] = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.03}
"""The largest relative error of a token that is no difference. In float32, orders of addition give up to 1e-4 in deep
models, and a wrong number much more."""
_PAGE = 16
_CHUNK = 24
"""Tokens of a step of the runner; a text is computed in several, so that steps read pages of earlier ones."""
_NUM_TOKENS = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """How far one state of all tokens is from that of `transformers`."""

    what: str
    """As in "layer 1", after which it is taken."""
    error: float
    """Norm of the error over the norm of the state, the largest of all tokens; infinite if a number is not finite."""
    token: int
    """The token with that error."""
    tolerance: float
    """The largest error that is no difference."""

    @property
    def is_different(self) -> bool:
        """Whether the error is too large."""
        return not self.error <= self.tolerance

    @classmethod
    def of(cls, what: str, found: Tensor, expected: Tensor, *, tolerance: float) -> Deviation:
        """Compare states `[T, E]`.

        Raises:
            ValueError: they have different shapes.
        """
        if found.shape != expected.shape:
            raise ValueError(f"{what} must have the shape {tuple(expected.shape)}, got {tuple(found.shape)}")
        found, expected = found.double().cpu(), expected.double().cpu()
        norms = torch.linalg.vector_norm(expected, dim=-1).clamp(min=torch.finfo(torch.float64).tiny)
        errors = (torch.linalg.vector_norm(found - expected, dim=-1) / norms).nan_to_num(torch.inf)
        error, token = errors.max(0)
        return cls(what=what, error=float(error), token=int(token), tolerance=tolerance)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCheck:
    """A comparison of a model with its reference."""

    name: str
    reference: str
    computed_by: str
    """What computed the logits."""
    dtype: str
    """What the runner computes in; the states and the reference are computed in float32."""
    num_tokens: int
    states: Sequence[Deviation]
    """The embeddings, each layer but the last, and the last one with the norm behind it; computed by the parts in plain
    torch. Empty if `transformers` computes the model here, too."""
    logits: Deviation
    largest: float
    """Largest difference of a logit."""
    num_equal: int
    """Tokens after which both find the same token most probable."""

    @property
    def first(self) -> Deviation | None:
        """The first of all that is different; None: the models are the same."""
        return next((one for one in (*self.states, self.logits) if one.is_different), None)


def check_model(
    model: str | Path | None,
    *,
    reference: str | Path | None = None,
    device: Literal["cpu", "cuda"] = "cpu",
    dtype: Number = "float32",
    tokens: Sequence[int] | None = None,
    tolerance: float | None = None,
) -> ModelCheck:
    """Compute a text here and with `transformers`, both from files.

    Args:
        model: a folder or a GGUF file; None: the embedded model.
        reference: the folder that `transformers` reads; None: the same. Another one is compared as it is, for instance
            the folder that a GGUF file was made from.
        device: where both compute.
        dtype: of the runner's weights and activations; the CPU program rounds the weights of matrices alone. The
            reference is computed in float32.
        tokens: of the text; None: random ones.
        tolerance: see `Deviation`; None: that of float32 for states, and that of `dtype` for logits.

    Raises:
        ValueError: `transformers` is not installed or cannot load the reference, or a model is not supported.
        FileNotFoundError: a file is missing.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ValueError("a check needs transformers: pip install 'pagewood-engine[transformers]'")
    if dtype not in TOLERANCES:
        raise ValueError(f"dtype must be one of {', '.join(TOLERANCES)}, got {dtype!r}")
    if device == "cpu" and dtype == "float16":
        raise ValueError("dtype must be float32 or bfloat16 on a CPU, got float16")
    if reference is None and model is not None and is_gguf(Path(model)):
        raise ValueError("reference must be the folder that a GGUF file was made from, got None")
    folder = model_folder(model)
    config = EngineConfig(model=None if model is None else str(model))
    is_native = reason_for_transformers(config) is None
    if is_native and (found := ModelConfig.from_folder(folder)).is_encoder:
        raise ValueError(f"model must be a decoder, whose logits are compared, got the encoder {found.architecture}")
    where = torch.device(device)
    text = _text_of(tokens, folder, is_native=is_native)
    with torch.no_grad():
        states = _states(folder, text, device=where) if is_native else []
        logits, computed_by = _logits(folder, text, dtype=dtype, device=where, is_native=is_native)
        other = folder if reference is None else Path(reference)
        expected, expected_logits = _reference(other, text, device=where)
    limit = TOLERANCES["float32"] if tolerance is None else tolerance
    size = min(logits.shape[1], expected_logits.shape[1])  # a vocabulary may be padded in one of them
    logits, expected_logits = (x[:, :size].float().cpu() for x in (logits, expected_logits))
    return ModelCheck(
        name=model_name(model),
        reference=str(other),
        computed_by=computed_by,
        dtype=dtype,
        num_tokens=len(text),
        states=_deviations(states, expected, tolerance=limit),
        logits=Deviation.of(
            "logits", logits, expected_logits, tolerance=TOLERANCES[dtype] if tolerance is None else tolerance
        ),
        largest=float((logits - expected_logits).abs().max()),
        num_equal=int((logits.argmax(-1) == expected_logits.argmax(-1)).sum()),
    )


def _deviations(found: Sequence[Tensor], expected: Sequence[Tensor], *, tolerance: float) -> list[Deviation]:
    """Compare the states before each layer, and those after the last norm.

    Raises:
        ValueError: there are not as many of them.
    """
    if not found:
        return []
    if len(found) != len(expected):
        raise ValueError(f"reference must have {len(found) - 1} layers, as the model has, got {len(expected) - 1}")
    last = len(found) - 2
    names = ["embeddings", *(f"layer {index}" for index in range(last)), f"layer {last} and the last norm"]
    return [Deviation.of(*one, tolerance=tolerance) for one in zip(names, found, expected, strict=True)]


def _text_of(tokens: Sequence[int] | None, folder: Path, *, is_native: bool) -> list[int]:
    """Return the tokens of the text.

    Raises:
        ValueError: one is not in the vocabulary, or there are too few or too many.
    """
    if is_native:
        config = ModelConfig.from_folder(folder)
        vocab_size, longest, padding = config.vocab_size, config.max_position, None
    else:
        from pagewood.engine.runner.transformers.load import FoundModel

        found = FoundModel.of(folder)
        vocab_size, longest = found.config.get_text_config().vocab_size, found.max_position
        padding = found.padding
    if tokens is None:
        drawn = np.random.default_rng(0).integers(0, vocab_size, min(_NUM_TOKENS, longest)).tolist()
        return [abs(token - 1) if token == padding else token for token in drawn]
    if not 1 <= len(tokens) <= longest:
        raise ValueError(f"tokens must be 1 to {longest}, got {len(tokens)}")
    wrong = [token for token in tokens if not 0 <= token < vocab_size]
    if wrong:
        raise ValueError(f"tokens must be in [0, {vocab_size}), got {wrong[0]}")
    return list(tokens)


def _states(folder: Path, text: Sequence[int], *, device: torch.device) -> list[Tensor]:
    """Return the states `[T, E]` of a native model, as `_reference` does, computed by its parts in plain torch."""
    model = load_model(folder, TorchOps(), device=device)
    num_layers, length = model.config.num_layers, len(text)
    positions, tokens = torch.arange(length, device=device), torch.tensor(text, device=device)
    attention = WholeTexts([layer.mixer for layer in model.config.layers], length)
    numbers = (*range(num_layers), num_layers + 1)
    is_short = model.config.is_short(length)
    rotations = [rope(positions, is_short=is_short) for rope in model.ropes]
    recurrence = WholeTextStates(length)
    return model.states(tokens, rotations, attention, positions, recurrence=recurrence, captured=numbers)[1]


def _logits(
    folder: Path, text: Sequence[int], *, dtype: Number, device: torch.device, is_native: bool
) -> tuple[Tensor, str]:
    """Return the logits `[T, V]` of a runner that computes the text in chunks, and its name."""
    max_length, num_pages = len(text) + 1, len(text) // _PAGE + 2
    config = ModelConfig.from_folder(folder) if is_native else None
    short_length = None if config is None else config.short_length
    has_states = config is not None and config.states is not None
    is_long = np.empty(0, np.int32) if short_length is None else np.array([len(text) > short_length], np.int32)
    if not is_native:
        from pagewood.engine.runner.cuda.device import CUDADevice
        from pagewood.engine.runner.cuda.runner import CUDARunner
        from pagewood.engine.runner.transformers.host_device import HostDevice
        from pagewood.engine.runner.transformers.load import FoundModel, load
        from pagewood.engine.runner.transformers.pages import PagedAttention
        from pagewood.kvpool.storage import KVStorage

        found = FoundModel.of(folder)
        model, shape = load(found, dtype=getattr(torch, dtype), device=device)
        storage = KVStorage(shape.layout(page_size=_PAGE, dtype=dtype), num_pages + 1, device=device)
        where = HostDevice(free_bytes=available_memory_bytes()) if device.type == "cpu" else CUDADevice()
        attention = PagedAttention(storage)
        runner: Any = CUDARunner(model, storage, None, where, max_rows=1, max_length=max_length, attention=attention)
        name = f"{found.name} of transformers over {'a cache in ' if model.attends_by_itself else ''}our pages"
    elif device.type == "cpu":
        runner, name = _cpu_runner(folder, max_length, num_pages, dtype=dtype), "the CPU program"
    else:
        runner, name = _cuda_runner(folder, max_length, dtype=dtype), "the CUDA runner"
    parts = [torch.as_tensor(runner.forward(batch)).clone() for batch in _batches(text, is_long, has_states=has_states)]
    runner.close()
    return torch.cat(parts), name


def _cpu_runner(folder: Path, max_length: int, num_pages: int, *, dtype: Number) -> Any:
    from pagewood.engine.runner.cpu.kernels import warm_up
    from pagewood.engine.runner.cpu.program.ops import CPUOps
    from pagewood.engine.runner.cpu.runner import CPURunner
    from pagewood.engine.runner.cpu.weights.packer import Packer

    assert dtype != "float16"
    ops = CPUOps(Packer(dtype, activations="float32"))
    model = load_model(folder, ops)
    layout = model.config.memory_layout(page_size=_PAGE, dtype="float32", order="HND")
    kernel = warm_up(layout, head_dims=model.config.head_dims, packed=ops.variants, others=ops.units)
    return CPURunner(
        model,
        storage_for(layout, num_pages),
        kernel,
        max_rows=1,
        max_length=max_length,
        num_threads=torch.get_num_threads(),
        states=None if model.config.states is None else allocate(model.config.states, 1),
    )


def _cuda_runner(folder: Path, max_length: int, *, dtype: Number) -> Any:
    from pagewood.engine.assembly.cuda.build import build_cuda_runner, kernel_needs, open_cuda
    from pagewood.engine.runner.cuda.kernels.flashinfer_compile import compile_kernels

    if dtype == "float32":
        raise ValueError("dtype must be float16 or bfloat16 on CUDA, where FlashInfer attends, got float32")
    config = EngineConfig(
        model=str(folder), device="cuda", dtype=dtype, max_running=1, max_length=max_length, cuda_graph=False,
        max_total_tokens=max_length + _PAGE, page_size=_PAGE, images="off",
    )  # fmt: skip
    device, flashinfer = open_cuda()
    compile_kernels(kernel_needs(config, ModelConfig.from_folder(folder)))
    return build_cuda_runner(device, flashinfer, config, folder, progress=None).runner


def _batches(text: Sequence[int], is_long: Int32, *, has_states: bool) -> list[Batch]:
    """Return steps that compute a text in chunks, on the first pages and with the first state; see `Batch`."""
    num_pages, empty = -(-len(text) // _PAGE), np.empty(0, np.int32)
    pages, places = (np.arange(num, dtype=np.int32) for num in (num_pages, len(text)))
    ids = np.array(text, np.int32)

    def batch(start: int) -> Batch:
        is_first = start == 0
        return Batch(
            admitted=np.zeros(1, np.int32) if is_first else empty,
            is_long=is_long if is_first else empty,
            page_rows=np.zeros_like(pages) if is_first else empty,
            page_columns=pages if is_first else empty,
            page_ids=pages.copy() if is_first else empty,
            token_rows=np.zeros_like(places) if is_first else empty,
            token_positions=places if is_first else empty,
            token_ids=ids if is_first else empty,
            rows=np.zeros(1, np.int32),
            starts=np.array([start], np.int32),
            states=np.array([[-1 if is_first else 0, 0]] * has_states, np.int32).reshape(-1, 2),
            counts=np.array([min(_CHUNK, len(text) - start)], np.int32),
            sampled=empty,
            num_promised=empty,
            sampling=SamplingArrays.of([], []),
        )

    return [batch(start) for start in range(0, len(text), _CHUNK)]


def _reference(folder: Path, text: Sequence[int], *, device: torch.device) -> tuple[Sequence[Tensor], Tensor]:
    """Return the states `[T, E]` of `transformers` before each layer and after the last norm, and its logits `[T, V]`.

    Raises:
        ValueError: it cannot load the folder.
    """
    import transformers

    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager", "local_files_only": True}
    try:
        config: Any = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        is_causal = type(config) in transformers.AutoModelForCausalLM._model_mapping
        kind: Any = transformers.AutoModelForCausalLM if is_causal else transformers.AutoModelForImageTextToText
        model = kind.from_pretrained(folder, **options).to(device).eval()
    except (OSError, ImportError, KeyError, RuntimeError) as error:
        raise ValueError(f"reference must be a folder that transformers loads, got {folder}: {error}") from error
    out = model(torch.tensor([text], device=device), output_hidden_states=True, use_cache=False)
    return [one[0] for one in out.hidden_states], out.logits[0]
