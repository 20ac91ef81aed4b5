"""Further HTTP processes: they have connections, and the first HTTP process answers."""
