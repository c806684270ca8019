"""Readers of raw logs: the files of a log, and their rows in blocks or as a stream."""
