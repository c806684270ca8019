"""After the last unit: every row is accounted for; the manifest and the report."""
