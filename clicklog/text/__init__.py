"""Delimited text: fields, their values, and checks of every field."""
