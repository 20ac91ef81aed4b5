"""The runner for CUDA devices, over FlashInfer; README.md of the repository says how far it has been run."""
