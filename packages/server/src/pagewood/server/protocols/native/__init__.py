"""The server's own protocol: generation with token ids, the tokenizer, and control of the server."""
