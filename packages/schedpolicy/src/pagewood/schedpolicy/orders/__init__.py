"""The order in which waiting requests are considered."""
