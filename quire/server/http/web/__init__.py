"""The page to talk to the served model in a browser."""
