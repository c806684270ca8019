"""``python -m etl import --resume`` of training sets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import etl.importers.parts
from clicklog.errors import OutputError
from clicklog.synthetic.log import synthesize
from clicklog.synthetic.model import SyntheticSettings
from etl.output import UNFINISHED_FILE
from etl.run import run
from tests.etl.runs import settings
from tests.etl.training_sets import SIZES, SPLIT, import_set, write_npy


class _PulledError(Exception):
    """As if the process had ended there."""


def test_resume(tmp_path: Path, monkeypatch) -> None:
    """Byte-identical, and what is done is not done again."""
    monkeypatch.setattr(etl.importers.parts, "ROWS_PER_PART", 16)
    write_npy(tmp_path / "in", [70, 50, 41])
    import_set(tmp_path / "in", tmp_path / "whole")
    write, written = etl.importers.parts.write_part, []

    def pull(table, path: Path) -> int:
        if len(written) == 5:
            raise _PulledError
        written.append(path.name)
        return write(table, path)

    with monkeypatch.context() as patch:
        patch.setattr(etl.importers.parts, "write_part", pull)
        with pytest.raises(_PulledError):
            import_set(tmp_path / "in", tmp_path / "out")
    assert (tmp_path / "out" / UNFINISHED_FILE).exists()
    with pytest.raises(OutputError, match="did not finish"):
        import_set(tmp_path / "in", tmp_path / "out")
    with pytest.raises(OutputError, match="table_sizes"):
        import_set(tmp_path / "in", tmp_path / "out", num_embeddings_per_feature=SIZES, resume=True)
    again: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(
            etl.importers.parts,
            "write_part",
            lambda t, path: again.append(path.name) or write(t, path),
        )
        import_set(tmp_path / "in", tmp_path / "out", resume=True)
    assert len(again) == 9 + 2 + 2 - 5  # parts of train, valid, test, less those that were there
    files = {path.relative_to(tmp_path / "whole") for path in (tmp_path / "whole").rglob("part.*")}
    files |= {Path("manifest.json"), SPLIT / "_metadata"}
    for file in files:
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    # once more: nothing to do; and never over something else
    assert import_set(tmp_path / "in", tmp_path / "out", resume=True)["rows"]["in"] == 161
    with pytest.raises(OutputError, match="finished"):
        import_set(tmp_path / "in", tmp_path / "out")


def test_resume_of_a_finished_import_with_other_settings(tmp_path: Path) -> None:
    for name in ("in", "other"):
        write_npy(tmp_path / name, [70, 50, 41])
    out = tmp_path / "out"
    sizes = {"num_embeddings_per_feature": SIZES}
    import_set(tmp_path / "in", out, **sizes)
    manifest = (out / "manifest.json").read_bytes()
    twice = {"num_embeddings_per_feature": tuple(2 * size for size in SIZES)}
    refused = [
        ({}, "in", r"table_sizes: \[.* before, None now"),
        (twice, "in", rf"table_sizes.0: {SIZES[0]} before, {2 * SIZES[0]} now"),
        ({**sizes, "modulo": True}, "in", "modulo: False before, True now"),
        (sizes, "other", "input_path: .*in' before, .*other' now"),
    ]
    for options, directory, message in refused:
        with pytest.raises(OutputError, match=rf"{message}(.|\n)*choose another --output_path"):
            import_set(tmp_path / directory, out, resume=True, **options)
    assert import_set(tmp_path / "in", out, resume=True, workers=3, **sizes)["rows"]["in"] == 161
    assert (out / "manifest.json").read_bytes() == manifest
    os.utime(tmp_path / "in" / "day_0_labels.npy", ns=(1, 1))
    with pytest.raises(OutputError, match=r"day_0_labels.npy.*modified: .* before, '1' now"):
        import_set(tmp_path / "in", out, resume=True, **sizes)


def test_resume_of_an_import_over_a_finished_run_and_of_a_run_over_an_import(
    tmp_path: Path,
) -> None:
    write_npy(tmp_path / "in", [70])
    synthesize(tmp_path / "raw", SyntheticSettings(days=2, rows_per_day=100))
    run(settings(tmp_path / "raw", tmp_path / "of_run"))
    import_set(tmp_path / "in", tmp_path / "of_import")
    with pytest.raises(OutputError, match="import: new"):
        import_set(tmp_path / "in", tmp_path / "of_run", resume=True)
    with pytest.raises(OutputError, match="import: no longer there"):
        run(settings(tmp_path / "raw", tmp_path / "of_import", resume=True))
