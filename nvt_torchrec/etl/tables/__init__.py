"""Tables that are joined to the log: found, read, and stored by their keys."""
