"""From logits to drawn tokens and their log probabilities."""
