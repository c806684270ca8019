"""Checkpoints as files: their record, their tensors, and the model in them."""
