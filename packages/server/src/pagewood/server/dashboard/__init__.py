"""The dashboard: snapshots of the engine, live data over HTTP, and the pages for browsers."""
