"""Files that are whole or absent, whoever else writes them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nvt_torchrec.base.files.atomic import atomic_path, write_text


def test_two_threads_of_a_process_write_the_same_file(tmp_path: Path) -> None:
    """As a worker does that still works for an interrupted run, when that run goes on."""
    file = tmp_path / "part"
    with atomic_path(file) as temporary, ThreadPoolExecutor(1) as other:
        temporary.write_text("rows")
        other.submit(write_text, file, "rows").result()
        assert file.read_text() == "rows"
        assert temporary.read_text() == "rows"
    assert file.read_text() == "rows"
    assert [path.name for path in tmp_path.iterdir()] == ["part"]
