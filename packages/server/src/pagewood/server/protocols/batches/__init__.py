"""OpenAI's files and batches: many requests in a file, answered when nothing else is to do."""
