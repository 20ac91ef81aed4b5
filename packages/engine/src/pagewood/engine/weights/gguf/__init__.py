"""GGUF, the files of llama.cpp: weights, configuration, tokenizer and chat template in one. Imports no torch."""
