"""Units of work: how a log is cut into them, the rows of each, its files, and its result."""
