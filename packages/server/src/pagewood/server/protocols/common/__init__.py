"""What the protocols have in common: the fields of a request, and the parts of an answer."""
