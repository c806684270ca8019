"""Readers of raw logs: which files there are, and their rows in blocks."""
