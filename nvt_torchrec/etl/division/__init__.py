"""How the log is cut: blocks, their units, and what a division of rows has to know."""
