"""The named tensors of safetensors files or of a GGUF file, mapped into memory."""

# pyright: basic
# safetensors has no types.

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pagewood.engine.json_fields import Fields
from pagewood.engine.models.families.registry import FAMILIES
from pagewood.engine.models.families.stored_layout import StoredLayout
from pagewood.engine.models.limits import read_size
from pagewood.engine.models.stored.checkpoint_files import checkpoint_files, holds_gguf, index_file, weight_map
from pagewood.engine.models.stored.fused_experts import separate_experts
from pagewood.engine.models.stored.stored_tensors import StoredTensors
from pagewood.engine.weights.checkpoint_formats import Format
from pagewood.engine.weights.gguf.parts import FILE
from pagewood.engine.weights.gguf.tensors import GGUFTensors
from pagewood.engine.weights.quantisation import Quantisation, read_quantisation


class TensorFiles(Protocol):
    """The files with the tensors of a checkpoint. Names are those of Hugging Face's decoders."""

    def names(self) -> Collection[str]:
        """Return the names of all tensors."""
        ...

    def header(self, name: str) -> tuple[tuple[int, ...], str]:
        """Return the shape and the dtype of a tensor, as headers of safetensors name it."""
        ...

    def read(self, name: str) -> Tensor:
        """Return a tensor on the CPU."""
        ...

    def format_of(self, name: str) -> Format | None:
        """Return the quantisation of a matrix; None: it consists of plain numbers."""
        ...

    def is_unneeded(self, name: str) -> bool:
        """Whether no decoder needs a tensor."""
        ...

    def close(self) -> None:
        """Close the files."""
        ...


class SafetensorsFiles:
    """`TensorFiles` of safetensors.

    Args:
        files: by the names of the tensors that they hold.
        quantisation: of matrices; None: they consist of plain numbers.
    """

    __slots__ = ("_files", "_quantisation")

    def __init__(self, files: Mapping[str, safe_open], quantisation: Quantisation | None = None) -> None:
        self._files = dict(files)  # written by: close
        self._quantisation = quantisation

    @classmethod
    def of_folder(cls, folder: Path) -> SafetensorsFiles:
        """Open the files of a Hugging Face folder.

        Raises:
            FileNotFoundError: there are no safetensors in it, or a file of its index is missing.
            ValueError: a file is damaged, its quantisation is not supported, or the index contradicts the files.
        """
        opened = {path.name: _open(path) for path in checkpoint_files(folder)}
        files = _by_tensor(folder, opened)
        return cls(files, read_quantisation(folder, files, _metadata(opened.values())))

    @classmethod
    def of_paths(cls, paths: Iterable[Path]) -> SafetensorsFiles:
        """Open files that no folder describes: plain numbers only.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: a file is damaged, or a tensor is in two of them.
        """
        files: dict[str, safe_open] = {}
        for path in paths:
            file = _open(path)
            for name in _keys(file):
                if name in files:
                    raise ValueError(f"files must hold each tensor once, got {name} again in {path}")
                files[name] = file
        return cls(files)

    def names(self) -> Collection[str]:
        """Return the names of all tensors."""
        return self._files

    def header(self, name: str) -> tuple[tuple[int, ...], str]:
        """Return shape and dtype; only the header is read."""
        header = self._files[name].get_slice(name)
        return tuple(header.get_shape()), header.get_dtype()

    def read(self, name: str) -> Tensor:
        """Return a tensor, mapped."""
        return self._files[name].get_tensor(name)

    def format_of(self, name: str) -> Format | None:
        """Return the format of a matrix according to config.json."""
        return None if self._quantisation is None else self._quantisation.format_of(name)

    def is_unneeded(self, name: str) -> bool:
        """Whether a tensor scales activations."""
        return self._quantisation is not None and self._quantisation.is_unneeded(name)

    def close(self) -> None:
        """Close the files."""
        self._files.clear()


class GGUFFiles:
    """`TensorFiles` of the folder that was made for a GGUF file."""

    __slots__ = ("_tensors",)

    def __init__(self, folder: Path) -> None:
        """Map the file.

        Raises:
            ValueError: it is damaged, or something in it is not supported.
        """
        self._tensors: GGUFTensors | None = GGUFTensors(folder / FILE)  # written by: close

    def names(self) -> Collection[str]:
        """Return the names of all tensors."""
        return self._open.names()

    def header(self, name: str) -> tuple[tuple[int, ...], str]:
        """Return shape and type, as in "Q4_K"."""
        return self._open.header(name)

    def read(self, name: str) -> Tensor:
        """Return plain numbers, or the bytes of blocks `[rows, bytes]`."""
        array = self._open.array(name)
        is_bfloat16 = array.dtype == np.uint16
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) if is_bfloat16 else torch.from_numpy(array)

    def format_of(self, name: str) -> Format | None:
        """Return the blocks of a matrix."""
        return self._open.format_of(name)

    def is_unneeded(self, name: str) -> bool:
        """Whether a tensor is part of the configuration."""
        return self._open.is_unneeded(name)

    def close(self) -> None:
        """Drop the mapping; tensors that were read stay."""
        self._tensors = None

    @property
    def _open(self) -> GGUFTensors:
        assert self._tensors is not None
        return self._tensors


def open_tensors(folder: Path) -> TensorFiles:
    """Open the files with the weights of a folder; every expert has matrices of its own, see `fused_experts`.

    Raises:
        FileNotFoundError: there are no weights in it.
        ValueError: a file is damaged, or something in it is not supported.
    """
    return GGUFFiles(folder) if holds_gguf(folder) else arranged(folder, SafetensorsFiles.of_folder(folder))


def arranged(folder: Path, files: TensorFiles, *, like: TensorFiles | None = None) -> TensorFiles:
    """Return the files of a model as those of Llama's decoders, every expert with matrices of its own.

    The config.json of `folder` may name a family with another layout. For `like` see `separate_experts`.
    """
    found = stored_layout(folder)
    own = files if found is None else StoredTensors(files, found[0], num_heads=found[1])
    return separate_experts(own, like=like)


def stored_layout(folder: Path) -> tuple[StoredLayout, int] | None:
    """Return the layout of a folder's tensors and the number of query heads; None: the layout is Llama's."""
    file = folder / "config.json"
    fields = Fields.from_file(file) if file.is_file() else Fields(str(file), {})
    for name in fields.texts("architectures") or ():
        family = FAMILIES.get(name)
        family = None if family is None else family.of_file(fields.values)
        if family is not None and family.stored is not None:
            num_heads = read_size(fields.renamed(family.field_names), "num_attention_heads", "num_heads", 1)
            return family.stored, num_heads
    return None


def _keys(file: safe_open) -> Iterator[str]:
    return iter(file.keys())


def _by_tensor(folder: Path, opened: Mapping[str, safe_open]) -> dict[str, safe_open]:
    """Return the file of each tensor: the one that the index names, or the only one that holds it.

    Raises:
        ValueError: several files hold a tensor that the index does not list, or the listed file lacks it.
    """
    listed = weight_map(folder) or {}
    holders: dict[str, list[str]] = {}
    for file_name, file in opened.items():
        for name in _keys(file):
            holders.setdefault(name, []).append(file_name)
    found: dict[str, safe_open] = {}
    for name, holding in holders.items():
        wanted = listed.get(name)
        if wanted is None and len(holding) > 1:
            raise ValueError(f"{index_file(folder)} must say which file has {name}, got it in {' and '.join(holding)}")
        if wanted is not None and wanted not in holding:
            raise ValueError(
                f"{folder / wanted} must hold {name}, as {index_file(folder).name} says, got it in {holding[0]}"
            )
        found[name] = opened[wanted or holding[0]]
    return found


def _metadata(files: Iterable[safe_open]) -> Mapping[str, str]:
    return {key: value for file in files for key, value in (file.metadata() or {}).items()}


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise
    except (SafetensorError, OSError) as error:  # a folder, an empty file
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from error
