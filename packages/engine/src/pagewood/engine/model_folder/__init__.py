"""The folder or GGUF file of a model: its content, its recommendations, and its loading."""
