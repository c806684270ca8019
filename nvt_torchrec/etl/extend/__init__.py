"""Add days to a finished output: each day makes a generation, and OUT is switched to it at once."""
