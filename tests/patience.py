"""Time limits of tests."""

# For something that comes: what works comes sooner on any machine, however busy, and then the wait is over.
WAIT_S = 300.0
