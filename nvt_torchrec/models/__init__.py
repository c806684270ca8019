"""Models in plain PyTorch, their checkpoints and metrics, shared by training and serving."""
