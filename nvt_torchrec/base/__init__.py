"""What knows no click log: errors, command line, files, threads, devices, pages."""

__version__ = "0.2.0"
