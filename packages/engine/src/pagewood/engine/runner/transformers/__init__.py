"""The runner of models that have no table here: modules of `transformers` over pages of keys and values."""
