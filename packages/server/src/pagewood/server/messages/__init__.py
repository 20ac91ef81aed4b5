"""The messages between the processes, and the links that carry them."""
