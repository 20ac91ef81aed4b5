"""Other engines beside ours, each in a process of its own with the Python that has it; see `weights_peers.py`."""
