"""The trainer's settings, their checks and their command-line flags."""
