"""HTTP below the protocols: connections, bodies, checks, errors, and the application."""
