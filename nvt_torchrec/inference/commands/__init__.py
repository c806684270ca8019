"""The subcommands of ``python -m inference``."""
