"""What knows no click log: errors, command line, files, threads, devices, pages."""
