"""The functions of FlashInfer that the engine calls, as a Protocol that the module satisfies.

Legend: T tokens of a step, G grants, N pages of all grants, H query heads, K KV heads, D head_dim, P page_size.
Source: the signatures of flashinfer-python 0.7.2.
"""

from __future__ import annotations

from typing import Literal, Protocol, overload

import torch
from torch import Tensor

HEAD_DIMS = (64, 128, 256)
"""Head dimensions for which all kernels used here exist."""
LARGE_HEAD_DIMS = (512,)
"""Head dimensions for which they exist where keys and values have the dtype of queries, in tiles of their own."""

LATENT_DIMS = (512, 64)
"""Elements of a latent, and of its rotated key, for which FlashInfer has kernels."""


class DecodeWrapper(Protocol):
    """Attention for one token per grant."""

    _pin_memory_int_workspace_buffer: Tensor  # written by: cuda.attention
    """[bytes] uint8, pinned: the plan is copied from here to the device asynchronously."""
    _paged_kv_indices_buf: Tensor  # written by: cuda.attention
    """[pages of the step] int32 on the device, the page ids that `run` reads; as long as those of the plan at least."""

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
        """Decide how the work of a step is split.

        Args:
            indptr: `[G + 1] int32` on the host, first page of each grant in `indices`.
            indices: `[N] int32` on the device, page ids.
            last_page_len: `[G] int32` on the host, positions in the last page, in [1, P].
            num_qo_heads: H.
            num_kv_heads: K.
            head_dim: D.
            page_size: P.
            window_left: how many earlier positions a token sees; -1 means all.
            logits_soft_cap: None means no cap.
            sm_scale: multiplies the products of queries and keys; None means D ** -0.5.
            q_data_type: dtype of the queries.
            kv_data_type: dtype of the KV memory; None means that of the queries.
            non_blocking: whether to return before the copies to the device are done.
            seq_lens: `[G] int32` on the host, positions of each grant; None means that it is computed.
        """
        ...

    @overload
    def run(self, q: Tensor, paged_kv_cache: Tensor) -> Tensor: ...
    @overload
    def run(self, q: Tensor, paged_kv_cache: Tensor, *, return_lse: Literal[True]) -> tuple[Tensor, Tensor]: ...
    def run(self, q: Tensor, paged_kv_cache: Tensor, *, return_lse: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Return the attention `[G, H, D]` of `q` `[G, H, D]` over `[pages, 2, P, K, D]`.

        With `return_lse`, also return `[G, H] float32`: the logarithms, to base 2, of the sums of the softmaxes.
        """
        ...


class PrefillWrapper(Protocol):
    """Attention for any number of tokens per grant."""

    _pin_memory_int_workspace_buffer: Tensor  # written by: cuda.attention
    """[bytes] uint8, pinned: the plan is copied from here to the device asynchronously."""
    _paged_kv_indices_buf: Tensor  # written by: cuda.attention
    """[pages of the step] int32 on the device, the page ids that `run` reads; as long as those of the plan at least."""
    _custom_mask_buf: Tensor | None  # written by: cuda.attention
    """[bytes] uint8 on the device: bit `q * positions + p` of a grant is 1 if its token q sees position p."""
    _mask_indptr_buf: Tensor | None  # written by: cuda.attention
    """[G + 1] int32 on the device, first byte of each grant in the mask."""

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
        """Decide how the work of a step is split.

        The arguments are those of `DecodeWrapper.plan` and `qo_indptr` `[G + 1] int32` on the host, the first token of
        each grant. `causal` aligns the last token of a grant with its last position. `disable_split_kv` keeps the
        positions of a grant together.
        """
        ...

    @overload
    def run(self, q: Tensor, paged_kv_cache: Tensor) -> Tensor: ...
    @overload
    def run(self, q: Tensor, paged_kv_cache: Tensor, *, return_lse: Literal[True]) -> tuple[Tensor, Tensor]: ...
    def run(self, q: Tensor, paged_kv_cache: Tensor, *, return_lse: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Return the attention `[T, H, D]` of `q` `[T, H, D]` over `[pages, 2, P, K, D]`; see `DecodeWrapper.run`."""
        ...


class LatentWrapper(Protocol):
    """Attention over latents, for any number of tokens per grant.

    Legend: C elements of a latent, R elements of its rotated key.
    """

    _pin_memory_int_workspace_buffer: Tensor  # written by: cuda.attention
    """[bytes] uint8, pinned: the plan is copied from here to the device asynchronously."""

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
    ) -> None:
        """Decide how the work of a step is split.

        Args:
            qo_indptr: `[G + 1] int32` on the host, first token of each grant.
            kv_indptr: `[G + 1] int32` on the host, first page of each grant in `kv_indices`.
            kv_indices: `[N] int32` on the device, page ids.
            kv_len_arr: `[G] int32` on the host, positions of each grant.
            num_heads: H.
            head_dim_ckv: C.
            head_dim_kpe: R.
            page_size: P.
            causal: whether the last token of a grant is at its last position, and a token sees none behind its own.
            sm_scale: multiplies the products of queries and latents.
            q_data_type: dtype of the queries.
            kv_data_type: dtype of the latents.
        """
        ...

    def run(self, q_nope: Tensor, q_pe: Tensor, ckv_cache: Tensor, kpe_cache: Tensor) -> Tensor:
        """Return the attention `[T, H, C]` of `[T, H, C]` and `[T, H, R]` over `[pages, P, C]` and `[pages, P, R]`."""
        ...


class FlashInfer(Protocol):
    """The functions and classes of the module that are used here."""

    def rmsnorm(self, input: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None) -> Tensor:
        """Return the norm over the last axis of `[T, E]` or `[T, heads, D]`, written to `out` if it is given."""
        ...

    def fused_add_rmsnorm(self, input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> None:
        """Add `input` to `residual`, both `[T, E]`, and write the norm of the sum to `input`."""
        ...

    def gemma_rmsnorm(self, input: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None) -> Tensor:
        """Return the norm of `[T, E]`, as `rmsnorm` does, with 1 added to the weights in float32."""
        ...

    def gemma_fused_add_rmsnorm(self, input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> None:
        """Like `fused_add_rmsnorm`, with 1 added to the weights in float32."""
        ...

    def gelu_tanh_and_mul(self, input: Tensor, out: Tensor | None = None) -> Tensor:
        """Return `[T, I]`: gelu, with a hyperbolic tangent, of the first half of `[T, 2I]` times the second."""
        ...

    def silu_and_mul(self, input: Tensor, out: Tensor | None = None) -> Tensor:
        """Return `[T, I]`: silu of the first half of `[T, 2I]` times the second."""
        ...

    def apply_rope_with_cos_sin_cache_inplace(
        self,
        positions: Tensor,
        query: Tensor,
        key: Tensor,
        head_size: int,
        cos_sin_cache: Tensor,
        is_neox: bool = True,
    ) -> None:
        """Rotate `[T, heads * D]` in place by `positions` `[T]` and a table `[length, D] float32`, cosines first."""
        ...

    def append_paged_kv_cache(
        self,
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
        """Write keys and values `[T, K, D]` to `positions` `[T]` of grants `batch_indices` `[T]`; all on the device."""
        ...

    def append_paged_mla_kv_cache(
        self,
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
        """Like `append_paged_kv_cache`, for latents `[T, 512]` with rotated keys `[T, 64]`; rows may have strides."""
        ...

    def cutlass_fused_moe(
        self,
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
    ) -> list[Tensor] | Tensor:
        """Compute a mixture of N experts of size I, K of which each token has chosen.

        Args:
            input: `[T, E]`.
            token_selected_experts: `[T, K] int32`.
            token_final_scales: `[T, K] float32`, their shares.
            fc1_expert_weights: `[N, 2I, E]`, of each expert the gate behind the other projection.
            fc2_expert_weights: `[N, E, I]`.
            output_dtype: dtype of the result.
            quant_scales: of weights in codes; None: there are none.
            fc1_expert_biases: `[N, 2I]`, in the order of the weights.
            fc2_expert_biases: `[N, E]`.
            swiglu_alpha: `[N] float32`; with it, the gate is multiplied by the sigmoid of alpha times itself.
            swiglu_beta: `[N] float32`, added to the other projection.
            swiglu_limit: `[N] float32`, the largest value of the gate, and the largest size of the other projection.
            output: `[T, E]`, gets the result.
            use_fused_finalize: whether the results of a token are added in any order, which is faster.
        """
        ...

    def softmax(self, logits: Tensor, temperature: Tensor | None = None) -> Tensor:
        """Return the probabilities `[S, V] float32` of logits divided by `temperature` `[S] float32`."""
        ...

    def top_k_renorm_probs(self, probs: Tensor, top_k: Tensor, is_deterministic: bool = False) -> Tensor:
        """Return `[S, V]` with only the `top_k` `[S] int32` largest probabilities of each row, renormalized."""
        ...

    def top_p_renorm_probs(self, probs: Tensor, top_p: Tensor, is_deterministic: bool = False) -> Tensor:
        """Return `[S, V]` with only the largest probabilities whose sum reaches `top_p` `[S] float32`, renormalized."""
        ...

    def BatchDecodeWithPagedKVCacheWrapper(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
    ) -> DecodeWrapper:
        """Return a wrapper; with `use_cuda_graph`, its steps have exactly the number of grants of the buffers."""
        ...

    def BatchPrefillWithPagedKVCacheWrapper(
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
    ) -> PrefillWrapper:
        """Return a wrapper; with `use_cuda_graph`, buffers fix the number of grants, the first plan that of tokens.

        A wrapper with a graph and a mask reads the mask in every run, regardless of its plan.
        """
        ...

    def BatchMLAPagedAttentionWrapper(
        self,
        float_workspace_buffer: Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: Tensor | None = None,
        kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_len_arr: Tensor | None = None,
        backend: str = "auto",
    ) -> LatentWrapper:
        """Return a wrapper; with `use_cuda_graph`, its steps have exactly the number of grants of the buffers."""
        ...
