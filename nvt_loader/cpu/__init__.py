"""Blocks in CPU memory."""
