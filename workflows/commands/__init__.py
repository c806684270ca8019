"""The subcommands of ``python -m workflows``."""
