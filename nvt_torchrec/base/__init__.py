"""Shared infrastructure that does not depend on click logs: errors, files, threads, devices, …."""

__version__ = "0.2.0"
