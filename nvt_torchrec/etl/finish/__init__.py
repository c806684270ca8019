"""After the last unit: every row is accounted for, and the manifest says so."""
