"""Models in plain PyTorch: the contract of one, and those of this project."""
