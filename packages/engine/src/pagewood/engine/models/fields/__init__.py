"""From the fields of a config.json to the numbers of parts."""
