"""A bundle for other programs: ``python -m inference export``.

:mod:`.onnx_file`: one file that ONNX Runtime runs. :mod:`.triton`: a model repository for NVIDIA's
Triton Inference Server, of that file.
"""

#: By the value of ``--format``: what it is, and the function that writes it, which is imported when
#: it is called: ``export(bundle, output)``.
FORMATS = {
    "onnx": (
        "one file that ONNX Runtime runs, from raw columns to the probability",
        "onnx_file:export_onnx",
    ),
    "triton": ("a model repository of it for Triton Inference Server", "triton:export_triton"),
}
