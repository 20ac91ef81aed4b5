"""What a step computes: grants, the number of their tokens, drafts, and the arrays of a batch."""
