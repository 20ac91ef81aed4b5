"""A log of everything that an engine's decisions depend on, so that they can be taken again and explained.

`recorder` listens to an engine, `writer` puts what it heard into a file, `log_file` reads it again, `replay` runs the
planner and the policies on it, and `why` says in words what was decided about one request.
"""
