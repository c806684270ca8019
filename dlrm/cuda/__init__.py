"""Kernels for GPUs. They have not run on a GPU yet."""
