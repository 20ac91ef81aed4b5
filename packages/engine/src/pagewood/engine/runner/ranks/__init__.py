"""A model that several processes compute together: each has a part of every layer, and all compute the same steps."""
