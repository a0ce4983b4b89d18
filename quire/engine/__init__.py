"""The scheduler joined to an executor, and the thread that runs them."""
