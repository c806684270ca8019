"""Blocks on a GPU."""
