"""How often `python -m etl drift` raises a false alarm."""
