"""Drift: how the rows of a new day differ from those that a workflow was fitted on."""
