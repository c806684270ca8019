"""Export a bundle for other programs: ``python -m inference export``.

:mod:`.onnx_file` writes one file that ONNX Runtime runs. :mod:`.triton` puts that file into a model
repository for NVIDIA's Triton Inference Server.
"""

#: Value of ``--format`` → (help text, MODULE:FUNCTION). The function, ``export(bundle, output)``,
#: is imported only when it is called, because it imports PyTorch's exporter.
FORMATS = {
    "onnx": (
        "one file that ONNX Runtime runs, from raw columns to the probability",
        "onnx_file:export_onnx",
    ),
    "triton": (
        "a model repository with that file, for Triton Inference Server",
        "triton:export_triton",
    ),
}
