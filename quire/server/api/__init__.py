"""The APIs: each parses requests into jobs and encodes their events."""
