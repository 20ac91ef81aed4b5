"""FlashInfer's kernels and our own in Triton."""
