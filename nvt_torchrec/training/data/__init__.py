"""The data of a run: its splits, days and order of rows, and batches for all ranks."""
