"""Policies over traces in virtual time: what `python -m pagewood.schedpolicy.simulate` is made of."""
