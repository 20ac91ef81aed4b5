"""Several engines behind one HTTP process: which one gets a request, and what they are together."""
