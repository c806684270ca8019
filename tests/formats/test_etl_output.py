"""The paths in an output directory and the parts of its splits."""

from __future__ import annotations

from pathlib import Path

from nvt_torchrec.formats.etl_output import EtlOutput
from nvt_torchrec.formats.manifest import PartFile
from tests.manifests import write_manifest


def test_the_parts_of_a_split(tmp_path: Path) -> None:
    output = EtlOutput(tmp_path)
    parts = [PartFile(f"train/part.{i}.parquet", 1, 9, i, 0, "") for i in (0, 1, 10)]
    write_manifest(output.manifest, files=[*parts, PartFile("test/part.0.parquet", 1, 9, 2, 0, "")])
    assert output.parts("train") == parts
    assert output.parts("valid") == []
