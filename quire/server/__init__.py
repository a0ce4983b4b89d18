"""The front end: HTTP in, streams of text out."""
