"""Saved workflow + checkpoint → click probabilities.

:class:`Predictor` is imported on first use, because it needs torch, which takes 1 to 4 seconds to
import and which the command line and the server's parent process do without. Nothing here imports
NVTabular, Dask or pandas, except the benchmark.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from nvt_torchrec import __version__
from nvt_torchrec.clicklog.in_memory.errors import InvalidRowError, MissingColumnError

if TYPE_CHECKING:
    from nvt_torchrec.inference.predictor import Predictor

__all__ = ["InvalidRowError", "MissingColumnError", "Predictor", "__version__", "write_bundle"]


def __getattr__(name: str) -> type[Predictor]:
    if name == "Predictor":
        from nvt_torchrec.inference.predictor import Predictor

        return Predictor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def write_bundle(
    workflow: Path | str, checkpoint: Path | str, path: Path | str, *, tables: str = "float32"
) -> None:
    """Put a saved workflow and a checkpoint into one directory, which needs PyTorch alone.

    Args:
        workflow: Directory of the saved workflow.
        checkpoint: Directory of the training checkpoint.
        path: Directory to create.
        tables: Type of the embedding tables: ``float32``, ``float16`` or ``int8``.

    Raises:
        BadInputError: A file is missing or damaged.
        SchemaError: The workflow and the checkpoint do not belong together.
        OutputError: ``path`` is something else already, or cannot be written.
    """
    from nvt_torchrec.inference.model import bundle

    bundle.write_bundle(workflow, checkpoint, path, tables=tables)
