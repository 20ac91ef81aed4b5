"""FlashInfer's functions in plain torch, under FlashInfer's names: slow, but runs on any device.

`runner.cuda.flashinfer_api.FlashInfer` lists them. One request is computed at a time. As in FlashInfer, arrays that the
host reads must be on the host. Sums are in float64, so that they do not depend on the order in which torch adds; but
the sums of pieces of the attention are rounded to float32, and as in FlashInfer the pieces depend on the whole step,
unless the plan rules that out.

Legend: T tokens, G grants, H query heads, K KV heads, D head_dim, P page_size.
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce
from typing import Literal, overload

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    offsets: list[int]
    """[G + 1], first token of each grant."""
    pages: list[int]
    """[G + 1], first page of each grant."""
    lengths: list[int]
    """[G], positions of each grant."""
    page_size: int
    window_left: int
    soft_cap: float | None
    scale: float
    causal: bool
    dtype: torch.dtype
    kv_dtype: torch.dtype
    piece: int
    """Number of positions whose values are added together."""


class _Wrapper:
    """The common part of both wrappers. Invariant: `run` follows the latest `plan`."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str) -> None:
        if kv_layout != "NHD":
            raise ValueError(f"kv_layout must be NHD, got {kv_layout}")
        self.device = float_workspace_buffer.device
        self._pin_memory_int_workspace_buffer = torch.empty(1 << 12, dtype=torch.uint8)  # written by: cuda.attention
        self._paged_kv_indices_buf = torch.empty(0, dtype=torch.int32)  # written by: plan, cuda.attention
        self._plan: _Plan | None = None

    def _take(
        self,
        qo_indptr: Tensor,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        **options: object,
    ) -> None:
        for name, array in (
            ("qo_indptr", qo_indptr),
            ("indptr", indptr),
            ("indices", indices),
            ("last", last_page_len),
        ):
            if array.dtype != torch.int32:
                raise ValueError(f"{name} must be int32, got {array.dtype}")
        pages = _host(indptr)
        last: list[int] = _host(last_page_len)
        page_size = options["page_size"]
        assert isinstance(page_size, int)
        if not all(1 <= length <= page_size for length in last) or pages[-1] != len(indices):
            raise ValueError(f"every page must be filled and listed, got {last}, {pages} and {len(indices)} indices")
        lengths = [max(b - a - 1, 0) * page_size + n for a, b, n in zip(pages, pages[1:], last, strict=False)]
        self._paged_kv_indices_buf = indices
        self._plan = _Plan(
            offsets=_host(qo_indptr),
            pages=pages,
            lengths=lengths,
            **options,  # pyright: ignore[reportArgumentType]
        )

    @overload
    def run(self, q: Tensor, paged_kv_cache: Tensor) -> Tensor: ...
    @overload
    def run(self, q: Tensor, paged_kv_cache: Tensor, *, return_lse: Literal[True]) -> tuple[Tensor, Tensor]: ...
    def run(self, q: Tensor, paged_kv_cache: Tensor, *, return_lse: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Return the planned attention, and with `return_lse` the logarithms of the sums of its softmaxes."""
        plan = self._plan
        assert plan is not None
        for name, got, planned in (("q", q.dtype, plan.dtype), ("KV", paged_kv_cache.dtype, plan.kv_dtype)):
            if got != planned:
                raise ValueError(f"{name} must be planned with its dtype, got {got} and {planned}")
        if len(q) != plan.offsets[-1]:
            raise ValueError(f"q must have the {plan.offsets[-1]} tokens of the plan, got {len(q)}")
        grants = [grant for grant in range(len(plan.lengths)) if plan.offsets[grant] < plan.offsets[grant + 1]]
        parts = [self._attend(q, paged_kv_cache, plan, grant) for grant in grants]
        attended = torch.cat([attended for attended, _ in parts]).to(q.dtype)
        return (attended, torch.cat([sums for _, sums in parts]) / math.log(2)) if return_lse else attended

    def _seen(self, plan: _Plan, grant: int, num_tokens: int) -> Tensor:
        """Return which positions each token of a grant sees, `[tokens, positions] bool`."""
        length = plan.lengths[grant]
        distance = torch.arange(length - num_tokens, length)[:, None] - torch.arange(length)[None]
        seen = torch.ones_like(distance, dtype=torch.bool) if not plan.causal else distance >= 0
        if plan.window_left >= 0:
            seen &= distance <= plan.window_left
        return seen

    def _attend(self, q: Tensor, memory: Tensor, plan: _Plan, grant: int) -> tuple[Tensor, Tensor]:
        pages = self._paged_kv_indices_buf[plan.pages[grant] : plan.pages[grant + 1]].long()
        length = plan.lengths[grant]
        k, v = memory.index_select(0, pages).double().transpose(0, 1).flatten(1, 2)[:, :length]
        mine = q[plan.offsets[grant] : plan.offsets[grant + 1]].double()
        group = mine.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", mine, k) * plan.scale
        if plan.soft_cap:
            scores = plan.soft_cap * torch.tanh(scores / plan.soft_cap)
        seen = self._seen(plan, grant, len(mine))
        scores = scores.masked_fill(~seen.to(q.device), -torch.inf)
        weights = scores.softmax(-1)
        pieces = zip(weights.split(plan.piece, -1), v.split(plan.piece), strict=True)
        parts = (torch.einsum("hqk,khd->qhd", piece, values).float() for piece, values in pieces)
        return reduce(torch.add, parts), scores.logsumexp(-1).T.float()


@dataclass(frozen=True, slots=True, kw_only=True)
class _GraphMemory:
    """The memory that captured work reads; plans copy their arrays to it."""

    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor

    @classmethod
    def of(cls, indptr: Tensor | None, indices: Tensor | None, last_page_len: Tensor | None) -> _GraphMemory:
        if indptr is None or indices is None or last_page_len is None:
            raise ValueError("a wrapper for a graph needs all its buffers")
        return cls(indptr=indptr, indices=indices, last_page_len=last_page_len)

    def take(self, indptr: Tensor, indices: Tensor, last_page_len: Tensor) -> Tensor:
        """Copy the arrays of a plan; return the copy of `indices`."""
        if len(last_page_len) != len(self.last_page_len):
            raise ValueError(f"a graph of {len(self.last_page_len)} grants cannot take {len(last_page_len)}")
        if len(indices) > len(self.indices):
            raise ValueError(f"a graph with room for {len(self.indices)} pages cannot take {len(indices)}")
        self.indptr.copy_(indptr, non_blocking=True)
        self.last_page_len.copy_(last_page_len, non_blocking=True)
        self.indices[: len(indices)].copy_(indices)
        return self.indices[: len(indices)]


def _piece(num_grants: int, *, tile: int) -> int:
    """Return how many positions are added together; depends on the tile and on the split of grants."""
    return {16: 5, 64: 7, 128: 9}[tile] + min(num_grants, 8)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    """Attention for one token per grant."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout)
        self.use_tensor_cores = use_tensor_cores
        self._graph: _GraphMemory | None = None
        if use_cuda_graph:
            self._graph = _GraphMemory.of(
                paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer
            )

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        non_blocking: bool = True,
        seq_lens: Tensor | None = None,
    ) -> None:
        """Take the arrays of a step."""
        _check_lengths(seq_lens, indptr, last_page_len, page_size)
        if self._graph is not None:
            indices = self._graph.take(indptr, indices, last_page_len)
        self._take(
            torch.arange(len(indptr), dtype=torch.int32), indptr, indices, last_page_len, page_size=page_size,
            window_left=window_left, soft_cap=logits_soft_cap, scale=sm_scale or head_dim**-0.5, causal=False,
            dtype=q_data_type, kv_dtype=kv_data_type or q_data_type, piece=_piece(len(last_page_len), tile=16),
        )  # fmt: skip


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    """Attention for any number of tokens per grant."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        *,
        backend: str = "auto",
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout)
        self._backend = backend
        self._custom_mask_buf = custom_mask_buf  # written by: plan, cuda.attention
        self._mask_indptr_buf = mask_indptr_buf  # written by: plan, cuda.attention
        self._qo_indptr = qo_indptr_buf
        self._max_tokens: int | None = None
        self._graph: _GraphMemory | None = None
        if use_cuda_graph:
            if qo_indptr_buf is None:
                raise ValueError("a wrapper for a graph needs all its buffers")
            self._graph = _GraphMemory.of(paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf)

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        non_blocking: bool = True,
        seq_lens: Tensor | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        """Take the arrays of a step."""
        num_grants, num_tokens = len(paged_kv_last_page_len), _host(qo_indptr)[-1]
        _check_lengths(seq_lens, paged_kv_indptr, paged_kv_last_page_len, page_size)
        if self._graph is not None:
            self._max_tokens = self._max_tokens or num_tokens
            if num_tokens > self._max_tokens:
                raise ValueError(f"a graph of {self._max_tokens} tokens cannot take {num_tokens}")
            paged_kv_indices = self._graph.take(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
            assert self._qo_indptr is not None
            self._qo_indptr.copy_(qo_indptr, non_blocking=True)
        else:
            self._custom_mask_buf = self._mask_indptr_buf = None
        group = num_qo_heads // num_kv_heads
        average = num_tokens * group // num_grants
        if self._max_tokens is not None:  # a graph: the largest grant that it allows
            average = (self._max_tokens - num_grants + 1) * group
        tile = 128 if average > 64 or self._backend != "fa2" else 64 if average > 16 else 16
        self._take(
            qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size=page_size,
            window_left=window_left, soft_cap=logits_soft_cap, scale=sm_scale or head_dim_qk**-0.5, causal=causal,
            dtype=q_data_type, kv_dtype=kv_data_type or q_data_type,
            piece=_piece(1 if disable_split_kv else num_grants, tile=tile),
        )  # fmt: skip

    def _seen(self, plan: _Plan, grant: int, num_tokens: int) -> Tensor:
        """Return what the mask says, if there is one."""
        mask, offsets = self._custom_mask_buf, self._mask_indptr_buf
        if mask is None or offsets is None:
            return super()._seen(plan, grant, num_tokens)
        if self._backend != "fa2":
            raise ValueError(f"backend must be fa2 for masks, got {self._backend}")
        num_bits, first = num_tokens * plan.lengths[grant], _host(offsets)[grant]
        places = torch.arange(num_bits)
        bits = (mask[first + places // 8] >> (places % 8)) & 1
        return bits.bool().view(num_tokens, -1)


class BatchMLAPagedAttentionWrapper:
    """Attention over latents. Invariant: `run` follows the latest `plan`."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: Tensor | None = None,
        kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_len_arr: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        self._pin_memory_int_workspace_buffer = torch.empty(1 << 12, dtype=torch.uint8)  # written by: cuda.attention
        self._qo_indptr = qo_indptr
        self._graph = _GraphMemory.of(kv_indptr, kv_indices, kv_len_arr) if use_cuda_graph else None
        self._plan: _Plan | None = None
        self._sizes, self._indices = (0, 0), torch.empty(0, dtype=torch.int32)

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        use_profiler: bool = False,
    ) -> None:
        """Take the arrays of a step."""
        offsets, pages, lengths = (_host(array) for array in (qo_indptr, kv_indptr, kv_len_arr))
        needed = [-(-length // page_size) for length in lengths]
        if np.diff(pages).tolist() != needed or pages[-1] != len(kv_indices):
            raise ValueError(f"grants of {lengths} positions must have {needed} pages, got {pages}")
        if self._graph is not None:
            kv_indices = self._graph.take(kv_indptr, kv_indices, kv_len_arr)
            assert self._qo_indptr is not None
            self._qo_indptr.copy_(qo_indptr, non_blocking=True)
        self._sizes, self._indices = (head_dim_ckv, head_dim_kpe), kv_indices
        self._plan = _Plan(
            offsets=offsets, pages=pages, lengths=lengths, page_size=page_size, window_left=-1,
            soft_cap=None, scale=sm_scale, causal=causal, dtype=q_data_type, kv_dtype=kv_data_type,
            piece=_piece(len(lengths), tile=64),
        )  # fmt: skip

    def run(self, q_nope: Tensor, q_pe: Tensor, ckv_cache: Tensor, kpe_cache: Tensor) -> Tensor:
        """Return the planned attention."""
        plan = self._plan
        assert plan is not None
        for x, size, dtype in (
            (q_nope, self._sizes[0], plan.dtype), (q_pe, self._sizes[1], plan.dtype),
            (ckv_cache, self._sizes[0], plan.kv_dtype), (kpe_cache, self._sizes[1], plan.kv_dtype),
        ):  # fmt: skip
            if x.ndim != 3 or x.shape[-1] != size or x.dtype != dtype:
                raise ValueError(f"a tensor must be planned with its size and dtype, got {x.shape} {x.dtype}")
        if len(q_nope) != plan.offsets[-1]:
            raise ValueError(f"q must have the {plan.offsets[-1]} tokens of the plan, got {len(q_nope)}")
        queries, memory = torch.cat([q_nope, q_pe], -1).double(), torch.cat([ckv_cache, kpe_cache], -1)
        return torch.cat([self._attend(queries, memory, plan, grant) for grant in range(len(plan.lengths))]).to(
            q_nope.dtype
        )

    def _attend(self, q: Tensor, memory: Tensor, plan: _Plan, grant: int) -> Tensor:
        pages = self._indices[plan.pages[grant] : plan.pages[grant + 1]].long()
        length, mine = plan.lengths[grant], q[plan.offsets[grant] : plan.offsets[grant + 1]]
        latents = memory.index_select(0, pages).double().flatten(0, 1)[:length]
        scores = torch.einsum("qhd,kd->hqk", mine, latents) * plan.scale
        if plan.causal:
            distance = torch.arange(length - len(mine), length)[:, None] - torch.arange(length)
            scores = scores.masked_fill(distance.to(q.device) < 0, -torch.inf)
        pieces = zip(scores.softmax(-1).split(plan.piece, -1), latents.split(plan.piece), strict=True)
        rank = self._sizes[0]
        return reduce(torch.add, (torch.einsum("hqk,kd->qhd", one, own[:, :rank]).float() for one, own in pieces))


def _check_lengths(seq_lens: Tensor | None, indptr: Tensor, last_page_len: Tensor, page_size: int) -> None:
    if seq_lens is None:
        return
    num_pages, last = np.diff(_host(indptr)), np.array(_host(last_page_len))
    expected = np.where(num_pages > 0, (num_pages - 1) * page_size + last, 0).tolist()
    if _host(seq_lens) != expected:
        raise ValueError(f"seq_lens must be {expected}, as the pages say, got {_host(seq_lens)}")


def rmsnorm(input: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None) -> Tensor:
    """Return the norm over the last axis."""
    x = input.double()
    normed = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.double()).to(input.dtype)
    return normed if out is None else out.copy_(normed)


def gemma_rmsnorm(input: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None) -> Tensor:
    """Return the norm over the last axis of a matrix, with 1 added to the weights."""
    if input.ndim != 2:
        raise ValueError(f"input must have 2 axes, got {input.ndim}")
    return rmsnorm(input, weight.double() + 1, eps, out)


def gemma_fused_add_rmsnorm(input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> None:
    """Add to the residual, and write the norm of the sum to the input, with 1 added to the weights."""
    fused_add_rmsnorm(input, residual, weight.double() + 1, eps)


def gelu_tanh_and_mul(input: Tensor, out: Tensor | None = None) -> Tensor:
    """Return gelu of the first half times the second."""
    gate, up = input.double().chunk(2, -1)
    product = (functional.gelu(gate, approximate="tanh") * up).to(input.dtype)
    return product if out is None else out.copy_(product)


def fused_add_rmsnorm(input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> None:
    """Add `input` to `residual`, and write the norm of the sum to `input`."""
    residual += input
    input.copy_(rmsnorm(residual, weight, eps))


def silu_and_mul(input: Tensor, out: Tensor | None = None) -> Tensor:
    """Return silu of the first half times the second, rounded once: vectors have other bits at the end of an array."""
    gate, up = input.double().chunk(2, -1)
    product = (functional.silu(gate) * up).to(input.dtype)
    return product if out is None else out.copy_(product)


def apply_rope_with_cos_sin_cache_inplace(
    positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor, is_neox: bool = True
) -> None:
    """Rotate heads in place."""
    if cos_sin_cache.dtype != torch.float32:
        raise ValueError(f"cos_sin_cache must be float32, got {cos_sin_cache.dtype}")
    cosines, sines = cos_sin_cache.index_select(0, positions)[:, None].chunk(2, -1)
    for x in (query, key):
        heads = x.view(x.shape[0], -1, head_size)
        first, second = heads.float().chunk(2, -1) if is_neox else (heads[..., ::2].float(), heads[..., 1::2].float())
        rotated = first * cosines - second * sines, second * cosines + first * sines
        heads.copy_(torch.cat(rotated, -1) if is_neox else torch.stack(rotated, -1).flatten(-2))


def append_paged_kv_cache(
    append_key: Tensor,
    append_value: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    paged_kv_cache: Tensor,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Write keys and values to their positions."""
    if append_key.dtype != paged_kv_cache.dtype:
        raise ValueError(f"keys must be of the dtype of the memory, got {append_key.dtype} and {paged_kv_cache.dtype}")
    page_size = paged_kv_cache.shape[2]
    first = kv_indptr.index_select(0, batch_indices)
    pages = kv_indices.index_select(0, first + positions // page_size).long()
    places = (positions % page_size).long()
    paged_kv_cache.index_put_((pages, torch.zeros_like(pages), places), append_key)
    paged_kv_cache.index_put_((pages, torch.ones_like(pages), places), append_value)


def append_paged_mla_kv_cache(
    append_ckv: Tensor,
    append_kpe: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
) -> None:
    """Write latents and their rotated keys to their positions."""
    page_size = ckv_cache.shape[1]
    first = kv_indptr.index_select(0, batch_indices)
    pages = kv_indices.index_select(0, first + positions // page_size).long()
    for values, memory in ((append_ckv, ckv_cache), (append_kpe, kpe_cache)):
        if values.dtype != memory.dtype:
            raise ValueError(f"latents must be of the dtype of the memory, got {values.dtype} and {memory.dtype}")
        memory.index_put_((pages, (positions % page_size).long()), values)


def cutlass_fused_moe(
    input: Tensor,
    token_selected_experts: Tensor,
    token_final_scales: Tensor,
    fc1_expert_weights: Tensor,
    fc2_expert_weights: Tensor,
    output_dtype: torch.dtype,
    quant_scales: list[Tensor] | None,
    fc1_expert_biases: Tensor | None = None,
    fc2_expert_biases: Tensor | None = None,
    *,
    swiglu_alpha: Tensor | None = None,
    swiglu_beta: Tensor | None = None,
    swiglu_limit: Tensor | None = None,
    output: Tensor | None = None,
    use_fused_finalize: bool = True,
) -> list[Tensor]:
    """Write a mixture of experts to `output`; nothing waits for the device, as in FlashInfer."""
    (count, rows, width), size = fc1_expert_weights.shape, fc2_expert_weights.shape[2]
    if token_selected_experts.dtype != torch.int32 or token_final_scales.dtype != torch.float32:
        raise ValueError(
            f"must be int32 and float32, got {token_selected_experts.dtype} and {token_final_scales.dtype}"
        )
    if (rows, width % 8, size % 8) != (2 * size, 0, 0) or fc2_expert_weights.shape != (count, width, size):
        raise ValueError(f"must fit and be multiples of 8, got {fc1_expert_weights.shape}, {fc2_expert_weights.shape}")
    if use_fused_finalize or quant_scales is not None or not input.is_contiguous():
        raise ValueError("must be an ordered sum of plain contiguous numbers")
    if (fc1_expert_biases is None) != (fc2_expert_biases is None):
        raise ValueError("both biases must be given, or none")
    assert output is not None
    chosen = token_selected_experts.long()
    both = (fc1_expert_weights.float()[chosen] @ input.float()[:, None, :, None])[..., 0]
    if fc1_expert_biases is not None:
        both = both + fc1_expert_biases.float()[chosen]
    other, gate = both.chunk(2, dim=-1)
    if swiglu_alpha is None or swiglu_beta is None or swiglu_limit is None:
        activated = functional.silu(gate) * other
    else:
        limit = swiglu_limit[chosen][..., None]
        gate, other = gate.minimum(limit), other.minimum(limit).maximum(-limit)
        activated = gate * torch.sigmoid(swiglu_alpha[chosen][..., None] * gate)
        activated = activated * (other + swiglu_beta[chosen][..., None])
    results = (fc2_expert_weights.float()[chosen] @ activated.to(input.dtype).float()[..., None])[..., 0]
    if fc2_expert_biases is not None:
        results = results + fc2_expert_biases.float()[chosen]
    output.copy_((results * token_final_scales[..., None]).sum(1).to(output_dtype))
    return [output]


def softmax(logits: Tensor, temperature: Tensor | None = None) -> Tensor:
    """Return probabilities."""
    scaled = logits.float() if temperature is None else logits.float() / temperature[:, None]
    return scaled.softmax(-1)


def top_k_renorm_probs(probs: Tensor, top_k: Tensor, is_deterministic: bool = False) -> Tensor:
    """Keep the probabilities that are at least the k-th largest."""
    ordered = probs.sort(-1, descending=True).values
    limit = ordered.gather(1, (top_k.clamp(max=probs.shape[1]) - 1).long()[:, None])
    return _renorm(probs, limit)


def top_p_renorm_probs(probs: Tensor, top_p: Tensor, is_deterministic: bool = False) -> Tensor:
    """Keep the largest probabilities whose sum reaches p."""
    ordered = probs.sort(-1, descending=True).values
    before = ordered.double().cumsum(-1) - ordered
    kept = (before < top_p[:, None]).sum(-1, keepdim=True)
    return _renorm(probs, ordered.gather(1, kept - 1))


def _renorm(probs: Tensor, limit: Tensor) -> Tensor:
    kept = torch.where(probs >= limit, probs, 0.0)
    return kept / kept.sum(-1, keepdim=True)


def _host(array: Tensor) -> list[int]:
    """Return the numbers of an array that must be on the host, so that reading it does not wait."""
    if array.device.type != "cpu":
        raise ValueError(f"the array must be on the host, got {array.device}")
    return np.asarray(array.numpy()).tolist()
