"""Tables that are joined to the log: find their files, read them, and store rows by key."""
