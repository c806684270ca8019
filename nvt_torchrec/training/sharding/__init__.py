"""The model under TorchRec: its configuration, plan, and tables on all ranks."""
