"""Making drafts, and verifying them."""
