"""The supported families: how fields of config.json become parts, and the names of tensors, as tables."""
