"""Plugs the prefix cache into other engines; each module imports its engine, and nothing else imports these modules."""
