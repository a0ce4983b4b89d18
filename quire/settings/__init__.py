"""Everything that decides a setting, before an engine is built."""
