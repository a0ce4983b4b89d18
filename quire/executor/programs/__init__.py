"""The compiled programs: which there are, when they are made, and how they are kept."""
