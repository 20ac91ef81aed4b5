"""The processes of the server: how they are started, watched, restarted and ended."""
