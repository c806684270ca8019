"""Synthetic click logs with a planted click model whose AUROC is known."""
