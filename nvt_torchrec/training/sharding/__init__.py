"""The model under TorchRec: its configuration, its sharding plan, and its tables on all ranks."""
