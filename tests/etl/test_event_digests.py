"""One digest over an output, its events included: what is of another day or changed is refused."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from nvt_torchrec.base.errors import BadInputError, ClickLogError
from nvt_torchrec.etl.extend.extend import extend
from nvt_torchrec.etl.settings import ExtendSettings
from nvt_torchrec.inference.encoder import Encoder
from nvt_torchrec.inference.model.bundle import read_bundle, save_bundle, write_bundle
from nvt_torchrec.training.data.choices import check_stores
from nvt_torchrec.training.settings.train_settings import parse_settings
from nvt_torchrec.workflows.__main__ import main as workflows
from nvt_torchrec.workflows.description import inspect
from tests.etl.event_logs import DAY
from tests.etl.findings import bad
from tests.etl.runs import change_json
from tests.inference.bundles import make_origin
from tests.inference.reference import to_serve
from tests.training.runs import with_tables
from tests.training.shapes import dlrm

STATE = "workflow/events/state.json"


def write_day(log: Path, directory: Path) -> Path:
    """Write the rows of day 2 as day 3: the same users, items and shops, so no id is added."""
    head, *rows = (log / "day_2.csv").read_text().splitlines()
    later = [",".join([str(int(time) + DAY), *rest]) for time, *rest in map(split_fields, rows)]
    file = directory / "day_3.csv"
    file.write_text("\n".join([head, *later, ""]))
    return file


def split_fields(row: str) -> list[str]:
    return row.split(",")


def extend_by(output: Path, day: Path) -> None:
    extend(ExtendSettings(output, str(day), engine="cpu"))


def change_digit(file: Path) -> None:
    """Change one digit of the last number in a JSON file, which keeps its size."""
    text = file.read_text()
    place = max(text.rfind(digit) for digit in "23456789")
    file.write_text(f"{text[:place]}{(int(text[place]) - 1)}{text[place + 1 :]}")


def assert_refused(output: Path, day: Path, match: str) -> None:
    """Whoever reads the events of an output refuses them, and says why."""
    workflow = output / "workflow"
    readers: list[Callable[[], object]] = [
        lambda: Encoder.load(workflow),
        lambda: write_bundle(workflow, output / "no checkpoint", output / "no bundle"),
        lambda: extend_by(output, day),
    ]
    for read in readers:
        with pytest.raises(ClickLogError, match=match) as caught:
            read()
        assert caught.value.remedy
    assert any(re.search(match, finding) for finding in bad(output))


def test_a_digit_of_the_state_is_not_changed_unnoticed(
    tmp_path: Path, event_outputs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    shutil.copytree(event_outputs[1], output)
    day = write_day(event_outputs[0], tmp_path)
    assert workflows(["inspect", str(output / "workflow")]) == 0
    change_digit(output / STATE)
    assert_refused(output, day, "state.json: not the file that was written")
    assert workflows(["inspect", str(output / "workflow")]) == 2
    assert "state.json: not the file that was written" in capsys.readouterr().err


def test_the_events_of_a_day_that_was_taken_back_are_refused(
    tmp_path: Path, event_outputs: tuple[Path, Path]
) -> None:
    """The day adds no id, so the digest of its workflow is that of the one before."""
    output, later = tmp_path / "out", tmp_path / "later"
    shutil.copytree(event_outputs[1], output)
    day = write_day(event_outputs[0], tmp_path)
    extend_by(output, day)
    shutil.copytree(output / "workflow", later)
    extend(ExtendSettings(output, undo=True, engine="cpu"))
    assert inspect(later).digest == inspect(output / "workflow").digest
    shutil.rmtree(output / "workflow/events")
    shutil.copytree(later / "events", output / "workflow/events")
    assert_refused(output, day, "state.json: ")
    # the whole workflow of that day: its description is not the one that the manifest lists
    shutil.rmtree(output / "workflow")
    shutil.copytree(later, output / "workflow")
    with pytest.raises(BadInputError, match=r"workflow/metadata.json: "):
        extend_by(output, day)
    assert any("generation 1" in finding for finding in bad(output))


def test_an_array_of_the_state_is_compared_by_inspect(
    tmp_path: Path, event_outputs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(event_outputs[1] / "workflow", tmp_path / "workflow")
    file = tmp_path / "workflow/events/recent.ids.npy"
    array = np.load(file)
    np.save(file, array[:, ::-1])
    assert workflows(["inspect", str(tmp_path / "workflow")]) == 2
    assert "recent.ids.npy: not the file that was written" in capsys.readouterr().err


def test_a_workflow_of_an_earlier_version_is_refused(
    tmp_path: Path, event_outputs: tuple[Path, Path]
) -> None:
    """It lists no state of its events."""
    shutil.copytree(event_outputs[1] / "workflow", tmp_path / "workflow")
    file = tmp_path / "workflow/metadata.json"
    change_json(file, lambda value: value["files"].pop("events/state.json"))
    with pytest.raises(BadInputError, match=r"an earlier version wrote it.*\n.*run the ETL again"):
        Encoder.load(tmp_path / "workflow")


def test_a_server_compares_the_state_in_a_bundle(
    tmp_path: Path, event_outputs: tuple[Path, Path]
) -> None:
    """Also where it does not read the tables."""
    workflow = event_outputs[1] / "workflow"
    schema = inspect(workflow).table_schema
    config = dlrm(schema.dense, schema.categorical, schema.table_sizes, 8, (8,), (8, 1))
    config = dataclasses.replace(config, labels=schema.labels)
    model, bundle = with_tables(config, 1), tmp_path / "bundle"
    save_bundle(bundle, workflow, to_serve(model, config), make_origin(0, (0,)))
    cpu = next(model.parameters()).device
    read_bundle(bundle, cpu)
    change_digit(bundle / STATE)
    with pytest.raises(BadInputError, match=r"state.json: not the file that was written"):
        read_bundle(bundle, cpu)


@pytest.mark.parametrize("by", ["training", "extend"])
def test_a_store_of_histories_is_compared_before_it_is_read(
    tmp_path: Path, event_outputs: tuple[Path, Path], by: str
) -> None:
    """Other ids of the same table would be trained on, and be linked into later generations."""
    output = tmp_path / "out"
    shutil.copytree(event_outputs[1], output)
    settings = parse_settings([f"--binary_path={output / 'criteo_binary/split'}"])
    check_stores(settings)
    store = next((output / "criteo_binary/split/_histories/recent").iterdir())
    np.save(store / "item.npy", np.load(store / "item.npy")[::-1])
    day = write_day(event_outputs[0], tmp_path)
    readers = {
        "training": lambda: check_stores(settings),
        "extend": lambda: extend_by(output, day),
    }
    with pytest.raises(BadInputError, match=r"item.npy: not the file that was written") as caught:
        readers[by]()
    assert caught.value.remedy


def test_check_reads_what_is_kept_for_further_days(
    tmp_path: Path, event_outputs: tuple[Path, Path]
) -> None:
    output = tmp_path / "out"
    shutil.copytree(event_outputs[1], output)
    file = output / "extension/events.0.npy"
    np.save(file, np.load(file)[:, ::-1])
    assert any("no day can be added" in finding for finding in bad(output))
