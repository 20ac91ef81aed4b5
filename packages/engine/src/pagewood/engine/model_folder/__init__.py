"""The folder or GGUF file of a model: what is in it, what it recommends, and how it is loaded."""
