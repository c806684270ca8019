"""A run's data: its splits, its days, the order of its rows, and batches for all ranks."""
