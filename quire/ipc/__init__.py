"""Messages between processes: front ends, the engine process and their supervisor."""
