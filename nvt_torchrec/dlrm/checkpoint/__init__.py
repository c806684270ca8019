"""Checkpoints: write, resume, read."""
