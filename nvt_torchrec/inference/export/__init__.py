"""A bundle for other programs: ``python -m inference export``.

:mod:`.onnx_file`: one file that ONNX Runtime runs. :mod:`.triton`: a model repository for NVIDIA's
Triton Inference Server, of that file.
"""
