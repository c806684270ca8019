"""GPU kernels of models. This package imports nothing else from :mod:`models`."""
