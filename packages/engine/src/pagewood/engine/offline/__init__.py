"""`LLM` and `AsyncLLM`: prompts in, completions out, in one process."""
