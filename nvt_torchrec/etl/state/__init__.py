"""The state of a run in its output directory: the claim, the plan, decompressed days."""
