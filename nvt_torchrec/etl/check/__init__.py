"""Checks behind ``python -m etl check``."""
