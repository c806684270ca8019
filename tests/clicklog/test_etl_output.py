"""The paths in an output directory, and reading parts of its manifest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clicklog.errors import BadInputError
from clicklog.etl_output import NAMES, EtlOutput


def test_paths(tmp_path: Path) -> None:
    output = EtlOutput(tmp_path)
    assert output.splits == tmp_path / "criteo_binary" / "split"
    assert (output.workflow, output.rejected) == (tmp_path / "workflow", tmp_path / "rejected")
    assert [path.name for path in (output.report, output.timings, output.manifest)] == [
        "report.html",
        "timings.json",
        "manifest.json",
    ]
    assert EtlOutput.of_splits(output.splits).manifest == output.manifest
    paths = (output.splits.parent, output.workflow, output.rejected, output.report)
    paths += (output.extension,)
    assert {path.name for path in (*paths, output.timings, output.manifest)} == set(NAMES)


@pytest.mark.parametrize(
    "text", ["3", "{}", '{"splits": 3}', '{"splits": {"train": []}}', "{", '{"splits": null}']
)
def test_a_manifest_of_other_values(tmp_path: Path, text: str) -> None:
    output = EtlOutput(tmp_path)
    output.manifest.write_text(text)
    with pytest.raises(BadInputError, match=r"manifest\.json"):
        output.manifest_value("splits", dict[str, dict[str, Any]])


def test_values_of_another_version_are_not_read(tmp_path: Path) -> None:
    output = EtlOutput(tmp_path)
    output.manifest.write_text(json.dumps({"format_version": 9, "rows": {"in": 3}, "new": [1]}))
    assert output.manifest_value("rows", dict[str, int]) == {"in": 3}
