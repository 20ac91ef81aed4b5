"""The caches below that of the engine: host memory, disk, a shared store."""
