"""The files of checkpoints: the record, the tensors, and reading the model."""
