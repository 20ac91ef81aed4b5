"""OpenAI's protocol: chat completions, completions and models."""
