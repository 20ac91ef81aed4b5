"""A GPU emulated by a CPU; see README.md in this folder."""
