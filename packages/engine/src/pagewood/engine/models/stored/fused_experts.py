"""The tensors of experts that a checkpoint stores together, shown as if each expert had its own.

Checkpoints hold experts in either way. Together they are `experts.gate_up_proj` and `experts.down_proj`, with the
outputs of an expert as rows (`[N, 2I, E]` and `[N, E, I]`) or as columns (`[N, E, 2I]` and `[N, I, E]`), as the shapes
tell. Beside biases (gpt-oss) the rows of the gate and of the other projection take turns, otherwise the gate comes
first. Codes of mxfp4 have rows of outputs. Granite names them `input_linear` and `output_linear`. Experts without a
gate have `experts.up_proj` alone.

Legend: N experts, I size of an expert, E hidden_size.
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from pagewood.engine.weights.checkpoint_formats import Format

if TYPE_CHECKING:
    from pagewood.engine.models.stored.tensor_files import TensorFiles

_FUSED = re.compile(
    r"(?P<place>.*\.)(?:experts\.(?P<kind>gate_up_proj|up_proj|down_proj)(?P<part>|_bias|_blocks|_scales)"
    r"|(?P<other>input_linear|output_linear)\.weight)"
)
_GATE_UP, _UP, _DOWN = ("gate_proj", "up_proj"), ("up_proj",), ("down_proj",)


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """A part of a stored tensor."""

    stored: str
    expert: int | None
    """None: the tensor is not of several experts."""
    rows: slice
    """Rows of the expert's outputs."""
    is_transposed: bool

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Return its shape in a tensor of the shape `stored`."""
        own = stored if self.expert is None else stored[1:]
        own = own[::-1] if self.is_transposed else own
        return (len(range(*self.rows.indices(own[0]))), *own[1:])

    def of(self, stored: Tensor) -> Tensor:
        """Return it, without a copy."""
        own = stored if self.expert is None else stored[self.expert]
        return (own.T if self.is_transposed else own)[self.rows]


class SeparateExperts:
    """`TensorFiles` in which every expert has its own matrices, whatever way other files hold them."""

    __slots__ = ("_files", "_names", "_views")

    def __init__(self, files: TensorFiles, views: Mapping[str, _View]) -> None:
        """Show `views` by name in place of the tensors of `files` that they are parts of."""
        self._files = files
        self._views = views
        hidden = {view.stored for view in views.values()}
        self._names = frozenset(name for name in files.names() if name not in hidden) | views.keys()

    def names(self) -> Collection[str]:
        """Return the names of all tensors."""
        return self._names

    def header(self, name: str) -> tuple[tuple[int, ...], str]:
        """Return shape and dtype."""
        view = self._views.get(name)
        if view is None:
            return self._files.header(name)
        shape, dtype = self._files.header(view.stored)
        return view.shape(shape), dtype

    def read(self, name: str) -> Tensor:
        """Return a tensor, mapped."""
        view = self._views.get(name)
        return self._files.read(name) if view is None else view.of(self._files.read(view.stored))

    def format_of(self, name: str) -> Format | None:
        """Return the format of a matrix."""
        return self._files.format_of(name)

    def is_unneeded(self, name: str) -> bool:
        """Whether no decoder needs a tensor."""
        return self._files.is_unneeded(name)

    def close(self) -> None:
        """Close the files."""
        self._files.close()


def separate_experts(files: TensorFiles, *, like: TensorFiles | None = None) -> TensorFiles:
    """Return files in which every expert has its own matrices: `files` themselves if they are so.

    Args:
        files: as they are stored.
        like: all files of the model as they are stored, if `files` may be some of its tensors only.
    """
    views = _all_views(files, files if like is None else like)
    return SeparateExperts(files, views) if views else files


def expert_parts(files: TensorFiles) -> dict[str, dict[str, Callable[[Tensor], Tensor]]]:
    """Return what lies in each tensor of `files`, as they are stored, that holds those of several experts.

    Functions return the tensor of a name as a view of the stored one.
    """
    found: dict[str, dict[str, Callable[[Tensor], Tensor]]] = {}
    for name, view in _all_views(files, files).items():
        found.setdefault(view.stored, {})[name] = view.of
    return found


def _all_views(files: TensorFiles, like: TensorFiles) -> dict[str, _View]:
    views: dict[str, _View] = {}
    for name in files.names():
        match = _FUSED.fullmatch(name)
        if match is not None:
            views |= _views(files, name, match, like if name in like.names() else files)
    return views


def _views(files: TensorFiles, name: str, match: re.Match[str], whole: TensorFiles) -> dict[str, _View]:
    """Return the parts of a tensor of all experts, by the names that they would have alone.

    The tensors beside it, which say how it is stored, are those of `whole`.
    """
    place, other = match["place"], match["other"]
    shape = files.header(name)[0]
    is_down = match["kind"] == "down_proj" or other == "output_linear"
    suffix = match["part"].replace("_bias", ".bias") if match["part"] else ".weight"
    is_alone = other is not None and len(shape) == 2  # Granite's shared experts
    if is_alone:
        place = place.replace("shared_mlp.", "block_sparse_moe.shared_mlp.")  # inside the part that adds their result
    names = _DOWN if is_down else _UP if match["kind"] == "up_proj" else _GATE_UP
    rows = [slice(None)]
    if names is _GATE_UP:
        takes_turns = f"{place}experts.gate_up_proj_bias" in whole.names()
        size = shape[0] if is_alone else _num_outputs(whole, shape, match)
        rows = [slice(0, None, 2), slice(1, None, 2)] if takes_turns else [slice(size // 2), slice(size // 2, None)]
    is_transposed = suffix == ".weight" and not is_alone and other is None and _has_columns(whole, place)
    return {
        f"{place}{'' if is_alone else f'experts.{expert}.'}{one}{suffix}": _View(
            stored=name, expert=None if is_alone else expert, rows=own, is_transposed=is_transposed
        )
        for expert in range(1 if is_alone else shape[0])
        for one, own in zip(names, rows, strict=True)
    }


def _num_outputs(files: TensorFiles, shape: tuple[int, ...], match: re.Match[str]) -> int:
    is_transposed = not match["part"] and match["other"] is None and _has_columns(files, match["place"])
    return shape[-1] if is_transposed else shape[1]


def _has_columns(files: TensorFiles, place: str) -> bool:
    """Whether outputs are columns: then `[N, E, 2I]` stands beside `[N, I, E]`. No shapes fit both ways."""
    names = [f"{place}experts.{kind}" for kind in ("gate_up_proj", "down_proj")]
    if any(name not in files.names() for name in names):
        return False
    (_, *gate_up), (_, *down) = (files.header(name)[0] for name in names)
    return len(gate_up) == len(down) == 2 and gate_up[1] == 2 * down[0] and gate_up[0] == down[1]
