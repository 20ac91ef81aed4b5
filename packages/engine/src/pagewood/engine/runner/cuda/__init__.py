"""The runner of a CUDA device, by FlashInfer (not yet run on a GPU)."""
