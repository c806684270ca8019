"""How close one epoch comes to what the data allow, over optimizers, batch sizes and models."""
