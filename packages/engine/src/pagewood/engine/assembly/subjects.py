"""The settings of an engine by subject, as the log at the start shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

SUBJECTS: Mapping[str, Sequence[str]] = {
    "model": (
        *("model", "model_impl", "adapters", "max_adapters", "max_adapter_rank", "max_adapter_expert_rank", "seed"),
    ),
    "device": (
        *("device", "num_threads", "weights", "activations", "dtype", "kv_cache_dtype", "batch_invariant"),
        *("cuda_graph", "cuda_graph_max_batch", "expert_kernels"),
    ),
    "ranks": (
        *("tensor_parallel_size", "pipeline_parallel_size", "expert_parallel", "expert_map", "enable_dp_attention"),
        *("expert_load", "nnodes", "node_rank", "master_addr", "node_secret_file", "insecure_no_node_secret", "role"),
    ),
    "KV memory": (
        *(
            "max_length",
            "max_total_tokens",
            "state_places",
            "mem_fraction",
            "page_size",
            "prefix_cache",
            "eviction_policy",
        ),
        *(
            "retained_share",
            "max_retain_s",
            "cache_history_tokens",
            "host_cache_gb",
            "disk_cache_path",
            "disk_cache_gb",
        ),
        *("remote_cache", "remote_cache_gb", "cache_write_policy"),
    ),
    "images": ("images", "image_cache_gb"),
    "requests": ("max_running", "max_queued", "max_queue_s", "refuse_late", "quotas", "stream_interval"),
    "scheduling": (
        *("schedule_policy", "schedule_weights", "schedule_ageing_s", "low_priority_first", "preemption_threshold"),
        *("schedule_conservativeness", "chunked_prefill_size", "target_step_s", "schedule_preset", "prefill_first"),
        *("max_prefills", "joint_prefill_tokens", "chunk_align", "overlap", "num_continuous_decode_steps"),
    ),
    "drafts": (
        *("speculative", "speculative_model", "speculative_num_tokens", "speculative_control", "speculative_verify"),
    ),
    "grammars": ("grammar_backend", "grammar_timeout_s", "logits_processors"),
    "decision log": ("decision_log", "decision_log_mb", "decision_log_tokens"),
}
"""Subject -> names of its settings; each setting has one subject."""
