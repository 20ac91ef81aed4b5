"""From a configuration to an engine: everything that depends on more than the core and one leaf."""
