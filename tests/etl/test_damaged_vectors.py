"""Outputs with vectors whose files are damaged, swapped or lead elsewhere."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nvt_torchrec.base.errors import (
    BadInputError,
    SchemaError,
)
from nvt_torchrec.base.files.artifact import FileEntry
from nvt_torchrec.etl.check.check_files import Output
from nvt_torchrec.etl.check.check_rows import _check_vector_pointers
from nvt_torchrec.etl.extend.extend import extend
from nvt_torchrec.etl.run import run
from nvt_torchrec.etl.settings import ExtendSettings
from nvt_torchrec.formats.etl_output import EtlOutput
from nvt_torchrec.workflows import compiled
from tests.etl.findings import bad
from tests.etl.runs import change_json, settings
from tests.etl.vector_logs import (
    DAY,
    VERSIONS,
    count_vectors,
    load_vector_spec,
    make_items,
    make_rows,
    write_days,
    write_items,
)

#: A file of the workflow that there is.
METADATA_ENTRY = "vectors/image/0/values.npy"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output with two parts of vectors."""
    directory = tmp_path_factory.mktemp("sound")
    raw, later = directory / "raw", directory / "later"
    rows = make_rows(300, 4)
    write_days(raw, [row for row in rows if row.time // DAY < 3])
    write_days(later, [row for row in rows if row.time // DAY == 3])
    write_items(raw / "items.csv", make_items(versions=3))
    write_items(later / "items_3.csv", make_items(1, versions=2, first_day=2))
    run(settings(raw, directory / "out", load_vector_spec(directory, versions=VERSIONS)))
    extend(
        ExtendSettings(
            directory / "out", str(later / "day_3.csv"), table=(f"items={later / 'items_3.csv'}",)
        )
    )
    return directory / "out"


@pytest.fixture
def output(sound: Path, tmp_path: Path) -> Path:
    """A copy to damage, whose splits and workflow share no files any more."""
    return Path(shutil.copytree(sound, tmp_path / "out"))


def part_files(output: Path, name: str, root: str = "workflow/vectors") -> list[Path]:
    """The files of a vector, in the order of their numbers."""
    files = (output / root / name).glob("*/values.npy")
    return sorted(files, key=lambda file: int(file.parent.name))


def test_a_sound_output_has_no_findings(sound: Path) -> None:
    assert bad(sound) == []
    assert len(part_files(sound, "text")) == 2


def test_check_finds_numbers_outside(output: Path) -> None:
    """As if another program had rewritten the parts, and the manifest."""
    count = count_vectors(output)[0]
    file = next((output / "criteo_binary/split/train").glob("part.*.parquet"))
    table = pq.read_table(file)
    numbers = table["text.vector"].to_numpy().copy()
    for wrong in (count, -2):
        numbers[7] = wrong
        index = table.schema.get_field_index("text.vector")
        changed = table.set_column(index, table.schema.field(index), pa.array(numbers, pa.int32()))
        batch = changed.to_batches()[0]
        found = Output(EtlOutput(output))
        _check_vector_pointers(found, "train/part.0.parquet", 100, batch, "text.vector", count)
        (finding,) = found.findings
        assert f"row 107, text.vector: vector {wrong}, but only {count} vectors exist" in str(
            finding
        )


def change_value(file: Path, value: float) -> None:
    values = np.load(file)
    values[1, 0] = value
    np.save(file, values)


@pytest.mark.parametrize("value", [0.25, np.nan, np.inf])
def test_check_finds_other_values(output: Path, value: float) -> None:
    """A digest differs, whatever the value; what is not finite is said as well."""
    change_value(part_files(output, "text", "criteo_binary/split/_vectors")[1], value)
    change_value(part_files(output, "image")[0], value)
    found = "\n".join(bad(output))
    assert re.search(r"split/_vectors/text/\d+/values.npy: not the file that was written", found)
    assert "workflow/vectors/image/0/values.npy: not the file that was written" in found
    assert ("a value that is not finite" in found) == (not np.isfinite(value))


def damage_dtype(file: Path) -> None:
    np.save(file, np.load(file).astype(np.float64))


def damage_width(file: Path) -> None:
    np.save(file, np.load(file)[:, :-1])


def damage_count(file: Path) -> None:
    np.save(file, np.load(file)[:-1])


def damage_length(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def damage_name(file: Path) -> None:
    file.parent.rename(file.parent.with_name("10000"))


@pytest.mark.parametrize(
    "damage", [damage_dtype, damage_width, damage_count, damage_length, damage_name]
)
def test_a_damaged_workflow_is_not_opened(output: Path, damage: Callable[[Path], None]) -> None:
    """Nothing is read outside of the files of a stranger's workflow, also with digests that fit."""
    workflow = output / "workflow"
    file = part_files(output, "text")[1]
    damage(file)
    with pytest.raises(BadInputError):
        compiled.load(workflow)
    if file.exists():
        entry = FileEntry.from_file(file).to_dict()
        name = str(file.relative_to(workflow))
        change_json(workflow / "metadata.json", lambda value: value["files"].update({name: entry}))
        if damage is damage_count:  # the store is sound, and numbers lead outside
            loaded = compiled.load(workflow)
            assert loaded.vectors is not None
            numbers = np.full((2, 1), loaded.vectors.stores[0].count, np.int32)
            with pytest.raises(SchemaError, match="which has"):
                loaded.vectors.take(numbers)
        else:
            with pytest.raises(BadInputError):
                compiled.load(workflow)


def rename_part(files: dict) -> None:
    (last,) = (name for name in files if name.startswith("vectors/text/") and "/0/" not in name)
    files["vectors/text/../../values.npy"] = files.pop(last)


@pytest.mark.parametrize(
    "change",
    [
        rename_part,
        lambda files: files.pop("vectors/text/0/values.npy"),
        lambda files: files.update({"vectors/text/x/values.npy": files[METADATA_ENTRY]}),
        lambda files: files.update({"vectors/other/0/values.npy": files[METADATA_ENTRY]}),
        lambda files: files.update({"vectors/text/10000/values.npy": files[METADATA_ENTRY]}),
    ],
)
def test_other_files_of_a_workflow_are_refused(
    output: Path, change: Callable[[dict], object]
) -> None:
    workflow = output / "workflow"
    change_json(workflow / "metadata.json", lambda value: change(value["files"]))
    with pytest.raises(BadInputError):
        compiled.load(workflow)


@pytest.mark.parametrize(
    ("key", "value"), [("width", 10**9), ("name", "../text"), ("dtype", "object"), ("table", "x")]
)
def test_another_spec_of_a_workflow_is_refused(output: Path, key: str, value: object) -> None:
    def change(content: dict) -> None:
        content["spec"]["vectors"][0][key] = value

    change_json(output / "workflow/metadata.json", change)
    with pytest.raises((BadInputError, SchemaError), match="spec"):
        compiled.load(output / "workflow")


def test_codes_that_lead_outside_are_refused_when_vectors_are_taken(output: Path) -> None:
    file = output / "workflow/tables/items/text.codes.npy"
    codes = np.load(file)
    np.save(file, np.full_like(codes, -7))
    loaded = compiled.load(output / "workflow")
    assert loaded.tables is not None
    assert loaded.vectors is not None
    table = loaded.tables.by_name["items"]
    rows = np.arange(len(table))
    numbers = np.stack(
        [table.take_vector_numbers("text", rows), table.take_vector_numbers("image", rows)]
    )
    with pytest.raises(SchemaError, match="vector -7 of text"):
        loaded.vectors.take(numbers)
