"""Where each request stands: waiting, running, paused or draining; and what moves it from one to another."""
