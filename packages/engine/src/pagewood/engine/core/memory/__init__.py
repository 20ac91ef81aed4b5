"""The KV memory of requests: rows, pages, cached prefixes, and which of these are kept."""
