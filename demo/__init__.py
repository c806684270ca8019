"""The main job as a user would run it, command by command: ``python -m demo``."""
