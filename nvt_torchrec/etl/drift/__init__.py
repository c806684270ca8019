"""How a day of raw rows differs from the training days of an output."""
