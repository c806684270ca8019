"""The directory of an output while a run works on it: its claim, its plan, decompressed days."""
