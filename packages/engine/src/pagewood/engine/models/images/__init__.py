"""The towers of models that see images. The configuration imports no torch."""
