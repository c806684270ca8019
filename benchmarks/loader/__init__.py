"""The loader beside Merlin's, TorchRec's and a plain DataLoader."""
