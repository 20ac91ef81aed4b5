"""Plugs the orders into other engines; each module imports its engine, and nothing else imports these modules."""
