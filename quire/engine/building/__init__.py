"""From settings and a model to its engine."""
