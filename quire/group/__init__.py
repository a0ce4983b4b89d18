"""The link between the members of a group: several processes, on one host or several, that are one engine."""
