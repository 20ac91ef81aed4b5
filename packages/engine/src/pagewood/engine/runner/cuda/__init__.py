"""The runner for CUDA devices, based on FlashInfer; docs/howto/on-your-gpu.md lists the devices that have run it."""
