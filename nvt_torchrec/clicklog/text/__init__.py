"""Parsers of delimited text, which check every field."""
