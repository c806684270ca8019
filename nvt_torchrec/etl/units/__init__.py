"""The work on a unit: the rows of its split, its files, and its result."""
