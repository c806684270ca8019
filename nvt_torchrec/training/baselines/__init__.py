"""What a model starts from, and what it is compared with."""
