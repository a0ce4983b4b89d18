"""Pages that come from and go to places outside of an engine: tiers, folders and peers."""
