"""Runners compute batches: they own the device memory, the token table and the page table."""
