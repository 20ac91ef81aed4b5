"""Copies between the tiers: pages down to host and stores, and back up for a request that waits."""
