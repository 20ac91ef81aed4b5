"""Random scenarios: traffic through an engine around the echo model, compared with its sequential oracle."""
