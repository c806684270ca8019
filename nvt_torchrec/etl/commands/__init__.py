"""The subcommands of ``python -m etl``."""
