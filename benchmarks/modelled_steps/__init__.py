"""A real server whose engines wait for each step as long as a model of steps says, instead of computing it."""
