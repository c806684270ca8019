"""Columns that are computed from what a file holds, and the keys by which rows are split."""
