"""What a rank does before training: CPUs, process group, signals."""
