"""Importers of training sets of TorchRec and NVIDIA, and of workflows of NVTabular."""
