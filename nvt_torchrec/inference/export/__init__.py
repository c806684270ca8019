"""A bundle for other programs: ``python -m inference export``.

:mod:`.torch_package`: one file that PyTorch alone runs. :mod:`.triton`: a model repository for
NVIDIA's Triton Inference Server.
"""
