"""What is measured of steps and decided by it, and how tokens leave in groups."""
