"""What training and serving share: models in plain PyTorch, their records and metrics."""
