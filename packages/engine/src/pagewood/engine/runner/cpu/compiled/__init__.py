"""The compiled loops of the CPU runner. They hold no state; every one has a torch or numpy oracle in the tests."""
