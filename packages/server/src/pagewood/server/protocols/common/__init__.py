"""The common parts of the protocols: the fields of a request, and the parts of an answer."""
