"""What can be watched: snapshots of the engine, live data over HTTP, and the pages for browsers."""
