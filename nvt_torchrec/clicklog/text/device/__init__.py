"""Parsing of logs in Criteo's format on a card."""
