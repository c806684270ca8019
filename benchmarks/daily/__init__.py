"""What a day of work costs and what it is worth: never updated, updated daily, or refitted."""
