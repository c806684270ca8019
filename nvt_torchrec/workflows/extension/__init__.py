"""The next generation of a saved workflow: what a day adds to it, and what has to be remembered."""
