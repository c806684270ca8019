"""Rows in memory: frames, tables, dicts and lists, read by the rules of a spec."""
