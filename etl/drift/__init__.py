"""Compare a raw day with the days that the workflow of an output was fitted on."""
