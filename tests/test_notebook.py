"""examples/notebook.ipynb, executed from the first cell to the last in a kernel of its own."""

from __future__ import annotations

import ast
import re
import socket
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from tests.shell import ROOT

NOTEBOOK = ROOT / "examples" / "notebook.ipynb"


def test_it_goes_from_a_frame_to_a_served_score(tmp_path: Path) -> None:
    """Its last cell compares the served score with the Predictor's."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    with socket.socket() as probe:  # another test, or a server, may listen on the notebook's port
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for cell in notebook.cells:
        cell.source = cell.source.replace("PORT = 8123", f"PORT = {port}")
        cell.source = cell.source.replace("rows_per_day=8000", "rows_per_day=3000")
    NotebookClient(notebook, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", [])]
    pages = [out["data"]["text/html"] for out in outputs if "IFrame" in _text(out)]
    assert len(pages) == 2
    for name in ("OUT/report.html", "LOG/training.html"):
        assert any(f'src="fit/{name}"' in page for page in pages)
        assert (tmp_path / "fit" / name).is_file()
    [area] = [text for text in map(_text, outputs) if re.fullmatch(r"\(0\.\d+, 0\.\d+\)", text)]
    ours, best = ast.literal_eval(area)
    assert 0.7 < ours < best  # of tomorrow's rows


def _text(output: dict) -> str:
    return output.get("data", {}).get("text/plain", "")


def test_it_is_stored_without_outputs() -> None:
    """They would be paths of somebody's machine, and change with each run."""
    for cell in nbformat.read(NOTEBOOK, as_version=4).cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
