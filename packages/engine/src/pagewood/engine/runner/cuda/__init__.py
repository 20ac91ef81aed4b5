"""The runner for CUDA devices, based on FlashInfer; the repository's README.md lists the devices that have run it."""
