"""Adding days to a finished output: each day is a generation, which OUT is switched to at once."""
