"""Kernels of models on a GPU. Imports nothing of :mod:`models`."""
