"""Observation of a running engine: cache events, profiles, histograms and live views."""
