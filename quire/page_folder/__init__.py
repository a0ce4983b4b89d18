"""Pages in files: the tier behind host memory, which survives the server."""
