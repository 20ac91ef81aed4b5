"""Which waiting requests may be admitted, apart from their order."""
