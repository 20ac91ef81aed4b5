"""The stages around the engine: from text to tokens, and back."""
