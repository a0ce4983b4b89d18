"""The processes of a server: supervisor, engine and HTTP workers."""
