"""Lines of descent: what extending logs, and what the commands show and compare."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from nvt_torchrec import workflows
from nvt_torchrec.base.errors import BadInputError, SchemaError, SettingsError
from nvt_torchrec.formats.spec.feature_spec import CategoricalColumn, FeatureSpec
from nvt_torchrec.workflows.difference import difference
from nvt_torchrec.workflows.report import days_text
from nvt_torchrec.workflows.writer import Fitted, write_workflow
from tests.workflows.line import SPEC, day, edit, fitted, run, write_line
from tests.workflows.test_extension import extend, write_base


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_line(tmp_path_factory.mktemp("line"))


@pytest.fixture
def copy(line: Path, tmp_path: Path) -> Path:
    return shutil.copytree(line / "2", tmp_path / "copy")


def test_full_tables_are_logged(
    line: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "nvt_torchrec.workflows.extension")
    extend(line / "0", tmp_path / "1", day(6, item={"c": 1}))
    assert "generation 1, day 6: 0 values added, 0 ids reused" in caplog.messages
    assert (
        "at max_table_size: item (2 values wait for an id)\n"
        "  -> --retire_after_days N gives them the ids of values that are no longer seen"
        in caplog.messages
    )
    caplog.clear()
    extend(line / "0", tmp_path / "2", day(6, item={"c": 1}), retire_after_days=2)
    assert "generation 1, day 6: 0 values added, 1 ids reused" in caplog.messages


def test_inspect_shows_the_line(line: Path) -> None:
    done = run("inspect", line / "2" / "workflow")
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.split("line of descent\n")[1].splitlines()[:4]]
    digests = [one.digest[:12] for one in workflows.inspect(line / "2" / "workflow").lineage]
    assert lines == [
        ["generation", "digest", "days", "values", "added", "ids", "reused"],
        ["0", digests[0], "3-4", "5", "5", "0"],
        ["1", digests[1], "6", "7", "2", "0"],
        ["2", digests[2], "7", "8", "1", "1"],
    ]


def test_lookup_says_which_days_were_counted(line: Path) -> None:
    for name, answer in (
        ("0", "user 3: 1 (6 times in the training days)\n"),
        ("2", "user 3: 1 (6 times in the days counted)\n"),
    ):
        assert run("lookup", line / name / "workflow", "user", 3).stdout == answer


def test_diff(line: Path) -> None:
    done = run("diff", line / "0" / "workflow", line / "2" / "workflow")
    assert done.returncode == 0, done.stderr
    lines = {line.split()[0]: " ".join(line.split()) for line in done.stdout.splitlines() if line}
    assert lines["cat_0"] == "cat_0 2 1 0 6 5 = 00000099"
    assert lines["user"] == "user 1 2 0 6 4 = 5; 5 = 9"
    assert lines["item"] == "item 2 0 1 5 3 = e, was a"
    assert "city" not in lines
    assert lines["price"].startswith("price 2 9.42857 1 ")
    done = run("diff", line / "0" / "workflow", line / "1" / "workflow", "--examples", 0)
    assert "00000099" not in done.stdout
    assert done.stdout.endswith("statistics of dense columns\n  unchanged\n")
    done = run("diff", line / "1" / "workflow", line / "1" / "workflow")
    assert done.stdout.endswith("both encode every row equally\n")


def test_workflows_that_do_not_descend_from_one_another(line: Path, tmp_path: Path) -> None:
    first, second = (line / name / "workflow" for name in "02")
    with pytest.raises(SettingsError, match=r"descends from .*\n.*in the other order"):
        difference(second, first, 3)
    extend(line / "1", tmp_path / "1", day(9, user={77: 5}))
    with pytest.raises(
        SchemaError, match=r"parted after generation 1 .* counted day 7 and the other day 9"
    ):
        difference(second, tmp_path / "1" / "workflow", 3)

    def base(name: str, spec: FeatureSpec, state: Fitted, days: list[int]) -> Path:
        return write_base(tmp_path / name, spec, state, days) / "workflow"

    columns = (CategoricalColumn("cat_0", max_table_size=9), *SPEC.categorical[1:])
    other = FeatureSpec(SPEC.label, SPEC.dense, columns)
    with pytest.raises(SchemaError, match=r"spec.categorical\[0\].max_table_size is 0 ins"):
        difference(first, base("spec", other, fitted(), [3, 4]), 3)
    state = fitted()
    state.statistics["price"]["std"] = 5.0
    with pytest.raises(SchemaError, match="fitted with other counts"):
        difference(first, base("std", SPEC, state, [3, 4]), 3)
    with pytest.raises(SchemaError, match="fitted on different days, 3-4 and 2"):
        difference(first, base("days", SPEC, state, [2]), 3)
    imported = write_workflow(tmp_path / "imported", SPEC, state)
    assert imported.digest != workflows.inspect(first).digest
    with pytest.raises(SchemaError, match=r"imported has no line of descent"):
        difference(first, tmp_path / "imported", 3)


def test_ids_that_changed_although_the_lineage_does_not_say_so(copy: Path, line: Path) -> None:
    """A workflow whose metadata claim that it descends from another one."""
    state = fitted()
    state.vocabularies["cat_0"].values[0] = 6
    write_base(copy / "false", SPEC, state, [3, 4])
    extend(copy / "false", copy / "falser", day(6))
    first = workflows.inspect(line / "0" / "workflow").digest
    workflow = copy / "falser" / "workflow"
    edit(workflow / "metadata.json", lambda value: value["lineage"][0].update(digest=first))
    with pytest.raises(BadInputError, match="id 3 of vocabulary cat_0 has another value than in"):
        difference(line / "0" / "workflow", workflow, 3)


def test_days_of_a_dated_log_are_dates() -> None:
    assert days_text([0, 1, 2, 7]) == "0-2, 7"
    assert days_text([20513, 20514, 20516]) == "2026-03-01..2026-03-02, 2026-03-04"
