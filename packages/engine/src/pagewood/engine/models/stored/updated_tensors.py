"""The tensors of a model some of which have been replaced since it was loaded.

Legend: N elements of a tensor, M elements that are replaced.
"""

# pyright: basic
# safetensors and torch are typed in part only.

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from tempfile import NamedTemporaryFile

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from pagewood.engine.models.stored.checkpoint_files import holds_gguf
from pagewood.engine.models.stored.naming import Naming
from pagewood.engine.models.stored.tensor_files import SafetensorsFiles, TensorFiles, arranged, open_tensors
from pagewood.engine.models.stored.tied import EMBEDDING, OUTPUT, is_tied
from pagewood.engine.weights.checkpoint_formats import FLOATS, Format

INDICES, VALUES = ".sparse_indices", ".sparse_values"
"""Endings of the names of tensors that replace some elements of another one."""
_OUTER = ("language_model.model.", "model.language_model.", "language_model.", "model.")
"""What may stand before the name of a tensor of a decoder."""
_RENAMED = (
    (".mlp.experts.", ".block_sparse_moe.experts."),
    (".mlp.gate.", ".block_sparse_moe.gate."),
    (".router.weight", ".router.layer.weight"),
    ("vision_tower.", "vision_tower.vision_model."),
    ("vision_tower.vision_model.", "vision_tower."),
)
"""Parts of names in the memory of `transformers`, and in files of the same model."""
_EXPERT_PARTS = ((".gate_proj.", ".w1."), (".up_proj.", ".w3."), (".down_proj.", ".w2."))
"""Likewise, of the matrices of an expert."""


_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32",
}  # fmt: skip
"""Names of dtypes in headers."""
_TORCH = {name: dtype for dtype, name in _DTYPES.items()}


class MemoryFiles:
    """`TensorFiles` of plain numbers in memory.

    Args:
        tensors: by name; they are kept, and nothing may write to them.
    """

    __slots__ = ("_tensors",)

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> Collection[str]:
        """Return the names of all tensors."""
        return self._tensors.keys()

    def header(self, name: str) -> tuple[tuple[int, ...], str]:
        """Return shape and dtype."""
        tensor = self._tensors[name]
        return tuple(tensor.shape), _DTYPES[tensor.dtype]

    def read(self, name: str) -> Tensor:
        """Return a tensor."""
        return self._tensors[name]

    def format_of(self, name: str) -> Format | None:
        """Return None: there are plain numbers only."""
        return None

    def is_unneeded(self, name: str) -> bool:
        """Return False."""
        return False

    def close(self) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """A tensor in place of that of a model."""

    files: TensorFiles
    name: str
    """In the files."""
    sparse: Tensor | None = None
    """The tensor itself, if only some of its elements are in the files."""
    digest: bytes
    """Digest of its shape, dtype and numbers."""

    def header(self) -> tuple[tuple[int, ...], str]:
        """Return shape and dtype."""
        return self.files.header(self.name)

    def read(self) -> Tensor:
        """Return the tensor."""
        return self.files.read(self.name) if self.sparse is None else self.sparse


class UpdatedTensors:
    """`TensorFiles` of a model after updates. Immutable: an update makes another one.

    Args:
        folder: of the model.
        base: its files, which stay open.
        base_digest: of `base`, if these are not the files that the model was loaded from.
        stored: `base` as its tensors are stored; None: as no update can have them.
        first: the files that the model was loaded from; None: `base`.
        keeps_dtypes: whether plain numbers keep the dtype that they are given in; otherwise they get that of `first`.
        replaced: by name in `base`; a name that `base` lacks is that of a tied pair, or of a matrix that it quantises.
    """

    __slots__ = ("_base", "_base_digest", "_first", "_folder", "_keeps_dtypes", "_names", "_replaced", "_stored")

    def __init__(
        self,
        folder: Path,
        base: TensorFiles,
        replaced: Mapping[str, Replacement],
        *,
        base_digest: bytes = b"",
        stored: TensorFiles | None = None,
        first: TensorFiles | None = None,
        keeps_dtypes: bool = False,
    ) -> None:
        self._stored = stored
        self._keeps_dtypes = keeps_dtypes
        self._first = base if first is None else first
        self._base_digest = base_digest
        self._folder = folder
        self._base = base
        self._replaced = replaced
        self._names = (frozenset(base.names()) - self._hidden()) | replaced.keys()

    @classmethod
    def of_folder(cls, folder: Path, found: Path, *, keeps_dtypes: bool = False) -> UpdatedTensors:
        """Return the tensors of the model in `folder`: its own, or all replaced by those in `found`, in their forms.

        `keeps_dtypes`: see the class.

        Raises:
            FileNotFoundError: there are no weights in it.
            ValueError: a file is damaged, or something in it is not supported.
        """
        files = open_tensors(found)
        total = sha256()
        for name in sorted(files.names()) if found != folder else ():
            total.update(f"{name}\0".encode() + _digest(files.read(name)))
        return cls(
            folder,
            files,
            {},
            base_digest=b"" if found == folder else total.digest(),
            stored=None if holds_gguf(found) else SafetensorsFiles.of_folder(found),
            first=None if found == folder else open_tensors(folder),
            keeps_dtypes=keeps_dtypes,
        )

    @property
    def digest(self) -> str:
        """Distinguishes the tensors from all others of this model; it does not depend on what all were replaced in."""
        total = sha256(self._base_digest if self.lacking() else b"")
        for name in sorted(self._replaced):
            total.update(f"{name}\0".encode() + self._replaced[name].digest)
        return total.hexdigest()

    def with_files(self, files: TensorFiles) -> UpdatedTensors:
        """Return the tensors of this model after those in `files` have been replaced.

        Raises:
            ValueError: a tensor has no place in the model, or elements are to be replaced that it does not have.
        """
        files = arranged(self._folder, files, like=self._stored)
        names = set(files.names())
        sparse = {name.removesuffix(INDICES) for name in names if name.endswith(INDICES)}
        for name in sparse | {name.removesuffix(VALUES) for name in names if name.endswith(VALUES)}:
            lacking = [one for one in (name + INDICES, name + VALUES) if one not in names]
            if lacking:
                raise ValueError(f"elements of {name} must have indices and values, got no {lacking[0]}")
        replaced = dict(self._replaced)
        for name in sorted(names):
            if not name.endswith((INDICES, VALUES)):
                own = self._place(name)
                if own is not None:
                    replaced[own] = Replacement(files=files, name=name, digest=_digest(files.read(name)))
        for name in sorted(sparse):
            own = self._place(name)
            if own is None:
                continue
            tensor = self._patched(own, files.read(name + INDICES), files.read(name + VALUES))
            replaced[own] = Replacement(files=self, name=own, sparse=tensor, digest=_digest(tensor))
        return UpdatedTensors(
            self._folder,
            self._base,
            replaced,
            base_digest=self._base_digest,
            stored=self._stored,
            first=self._first,
            keeps_dtypes=self._keeps_dtypes,
        )

    def lacking(self) -> list[str]:
        """Return the names of the tensors that decoders need and no update has replaced."""
        return sorted(one for one in self._names - self._replaced.keys() if not self.is_unneeded(one))

    def on_disk(self, folder: Path) -> UpdatedTensors:
        """Return the same tensors; what was replaced lies in a file without a name in a folder, and is mapped from it.

        Raises:
            OSError: it cannot be written.
        """
        if not self._replaced:
            return self
        with NamedTemporaryFile(dir=folder, suffix=".safetensors") as file:
            try:
                save_file({name: one.read().contiguous() for name, one in self._replaced.items()}, file.name)
            except SafetensorError as error:
                raise OSError(f"updated weights could not be written to {folder}: {error}") from error
            files = SafetensorsFiles.of_paths([Path(file.name)])
        return UpdatedTensors(
            self._folder,
            self._base,
            {name: Replacement(files=files, name=name, digest=one.digest) for name, one in self._replaced.items()},
            base_digest=self._base_digest,
            stored=self._stored,
            first=self._first,
            keeps_dtypes=self._keeps_dtypes,
        )

    def names(self) -> Collection[str]:
        """Return the names of all tensors."""
        return self._names

    def header(self, name: str) -> tuple[tuple[int, ...], str]:
        """Return shape and dtype; plain numbers have that of the tensor that the model began with, or keep theirs."""
        shape, dtype = self._given_header(name)
        return shape, self._first_dtype(name, dtype)

    def read(self, name: str) -> Tensor:
        """Return a tensor, mapped unless elements of it were replaced or its dtype differs from that at the start."""
        one = self._replaced.get(name)
        tensor = self._base.read(name) if one is None else one.read()
        given = self._given_header(name)[1]
        dtype = self._first_dtype(name, given)
        return tensor if dtype == given else tensor.to(_TORCH[dtype])

    def _given_header(self, name: str) -> tuple[tuple[int, ...], str]:
        one = self._replaced.get(name)
        return self._base.header(name) if one is None else one.header()

    def _first_dtype(self, name: str, given: str) -> str:
        """Return the dtype of a tensor in the model's folder, as trainers expect; other forms would need other kernels.

        Whole numbers and quantised matrices are as they were given, and all numbers where `keeps_dtypes`.
        """
        if self._keeps_dtypes or (self._first is self._base and name not in self._replaced):
            return given
        if given not in FLOATS or name not in self._first.names() or self.format_of(name) is not None:
            return given
        first = self._first.header(name)[1]
        return first if first in FLOATS and self._first.format_of(name) is None else given

    def format_of(self, name: str) -> Format | None:
        """Return the format of a matrix; None: plain numbers, as all that have been replaced by such."""
        return None if name in self._replaced else self._base.format_of(name)

    def is_unneeded(self, name: str) -> bool:
        """Whether no decoder needs a tensor."""
        return self._base.is_unneeded(name)

    def close(self) -> None:
        """Do nothing: the next update needs the files."""

    def _place(self, name: str) -> str | None:
        """Return the name in this model of a tensor of an update; None: no decoder needs it.

        Raises:
            ValueError: there is no such tensor.
        """
        known = self._base.names()
        naming = Naming.of(known)
        inner = [name, *(name.removeprefix(outer) for outer in _OUTER if name.startswith(outer))]
        pair = self._pair() if is_tied(self._folder) else ()
        for one in inner:
            stored = naming.stored(f"model.{one}")
            for own in (one, stored, naming.stored(one), *_renamed(stored), *_renamed(one)):
                if own in known or own in pair or self._base.format_of(own) is not None:
                    return own
        if self._base.is_unneeded(name) or name.endswith("rotary_emb.inv_freq"):
            return None
        raise ValueError(f"an update must have tensors of the model, got {name}")

    def _patched(self, name: str, indices: Tensor, values: Tensor) -> Tensor:
        """Return a tensor with some elements replaced.

        Args:
            name: of the tensor.
            indices: `[M]` whole numbers in [0, N).
            values: `[M]`.
        """
        if name not in self._names or self.header(name)[1] not in FLOATS:
            raise ValueError(f"elements must be those of a tensor of plain numbers, got {name}")
        whole = self.read(name).contiguous().clone()
        if indices.shape != values.shape or indices.ndim != 1 or indices.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"elements of {name} must have as many values as indices, which are whole numbers, got "
                f"{tuple(values.shape)} values and {tuple(indices.shape)} indices of {indices.dtype}"
            )
        indices = indices.to(torch.int64)
        if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < whole.numel():
            raise ValueError(
                f"indices of {name} must be in [0, {whole.numel()}), got {int(indices.min())} to {int(indices.max())}"
            )
        whole.view(-1)[indices] = values.to(whole.dtype)
        return whole

    def _pair(self) -> tuple[str, str]:
        naming = Naming.of(self._base.names())
        return naming.stored(EMBEDDING), naming.stored(OUTPUT)

    def _hidden(self) -> set[str]:
        """Return the names in the files of the model of what replacements stand for under other names."""
        hidden = set[str]()
        for name in self._replaced.keys() - set(self._base.names()):
            module = name.removesuffix("weight")
            if self._base.format_of(name) is not None:
                hidden |= {one for one in self._base.names() if one.startswith(module) and one != f"{module}bias"}
        if is_tied(self._folder):
            pair = set(self._pair())
            given = pair & self._replaced.keys()
            if len(given) == 1:
                hidden |= pair - given
        return hidden


def checksums(files: TensorFiles, names: Sequence[str] | None = None) -> dict[str, str]:
    """Return the digest of each tensor, in hexadecimal digits; `names`: of these only."""
    return {name: _digest(files.read(name)).hex() for name in (sorted(files.names()) if names is None else names)}


def _renamed(name: str) -> list[str]:
    """Return the names that files may have for one in memory."""
    found: list[str] = []
    for old, new in _RENAMED:
        if old in name:
            own = name.replace(old, new)
            for part, other in _EXPERT_PARTS:
                own = own.replace(part, other)
            found.append(own)
    return found


def _digest(tensor: Tensor) -> bytes:
    own = tensor.contiguous()
    total = sha256(f"{own.dtype} {tuple(own.shape)}".encode())
    if math.prod(own.shape):
        total.update(own.view(-1).view(torch.uint8).numpy().data)
    return total.digest()
