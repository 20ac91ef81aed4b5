"""Pages in memory: their keys, their arrays on the device, and their images on the host."""
