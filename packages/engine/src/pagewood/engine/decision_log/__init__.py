"""A log of all inputs of an engine's decisions, so that they can be repeated and explained.

`recorder` observes an engine, `writer` writes its records into a file, `log_file` reads them again, `replay` runs the
planner and the policies on them, and `why` explains the decisions about one request.
"""
