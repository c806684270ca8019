"""Units of work: cutting a log into units; the rows, files and result of each unit."""
