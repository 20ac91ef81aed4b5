"""Jobs of many requests in a file: their lines, and how they are sent."""
