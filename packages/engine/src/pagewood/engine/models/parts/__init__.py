"""The parts of layers; a module has a part's numbers, the names and shapes of its tensors, and its computation."""
