"""Feature specs: what columns a raw log has, how they are typed, and how they are transformed."""
