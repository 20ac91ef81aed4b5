"""Measures, records and views of a running engine. They change no decision."""
