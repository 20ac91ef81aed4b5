"""Stores below the host: what a store is, a disk file, a shared folder, and what guards and copies for them."""
