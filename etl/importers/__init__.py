"""Importers of what TorchRec, NVIDIA and NVTabular preprocessed."""
