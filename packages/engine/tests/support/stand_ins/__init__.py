"""Stand-ins for a GPU, for FlashInfer and for a running step: used by our tests, checks and benchmarks, not shipped."""
