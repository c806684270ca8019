"""Start and stop a rank: CPU cores, process group, SIGTERM."""
