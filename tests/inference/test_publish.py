"""``python -m inference publish``: compare, switch, roll back, and what may go wrong."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from nvt_torchrec.base.errors import BadInputError, OutputError, SchemaError
from nvt_torchrec.base.files.atomic import locked, read_json
from nvt_torchrec.inference.__main__ import main
from nvt_torchrec.inference.model.bundle import compute_bundle_digest, make_bundle_name
from nvt_torchrec.inference.predictor import Predictor
from nvt_torchrec.inference.publish.steps import rollback
from tests.forks import seen_by
from tests.inference.bundles import ROWS, make_bundle, publish
from tests.mutations import expect_own_errors, flip_bit

pytestmark = pytest.mark.usefixtures("warm_trials")


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Four bundles, of the generations 0 to 3."""
    base = tmp_path_factory.mktemp("bundles")
    return [make_bundle(base / f"b{seed}", seed=seed, generation=seed) for seed in range(4)]


@pytest.fixture(scope="module")
def sample(bundles: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows whose labels are those that the first bundle expects."""
    rng = np.random.default_rng(0)
    rows = [ROWS[place] for place in rng.integers(0, len(ROWS), 4000)]
    labels = rng.random(len(rows)) < Predictor.load(bundles[0]).predict(rows)
    lines = [
        f"{label:d}\t{row['int_0']}\t\t{row['cat_0']}\t{row['cat_1']}\n"
        for label, row in zip(labels, rows, strict=True)
    ]
    path = tmp_path_factory.mktemp("raw") / "day_25"
    path.write_text("".join(lines))
    return path


@pytest.fixture
def served(tmp_path: Path) -> Path:
    """Where bundles are published; it is not there yet."""
    return tmp_path / "served"


def _name(bundle: Path) -> str:
    return make_bundle_name(compute_bundle_digest(bundle))


def _current(served: Path) -> str:
    """The name of the bundle that is served, which is whole."""
    Predictor.load(served / "current", check=True)
    assert _name(served / "current") == (served / "current").resolve().name
    return _name(served / "current")


def _stored(served: Path) -> set[str]:
    return {path.name for path in (served / "bundles").iterdir()}


def test_publish_and_roll_back(bundles: list[Path], tmp_path: Path, served: Path, capsys) -> None:
    names = [_name(bundle) for bundle in bundles]
    for number in (0, 1, 1, 2):
        assert main(["publish", str(bundles[number]), "--to", str(served)]) == 0
        assert _current(served) == names[number]
    assert f"serving {names[1]} already" in capsys.readouterr().out
    table = (served / "current" / "weights" / "table.npy").stat()
    assert table.st_ino == (bundles[2] / "weights" / "table.npy").stat().st_ino  # a hard link
    for number in (1, 0):
        assert main(["publish", "--to", str(served), "--rollback"]) == 0
        assert _current(served) == names[number]
    assert f"serving {names[0]} again, instead of {names[1]}" in capsys.readouterr().out
    assert main(["publish", "--to", str(served), "--rollback"]) == 2
    assert "nothing to roll back to: no earlier bundle" in capsys.readouterr().err
    publish(bundles[3], served)
    rollback(served)
    assert _current(served) == names[0]
    history = read_json(served / "history.json", "a history")["entries"]
    assert [entry["action"][0] for entry in history] == list("ppprrpr")
    assert [entry["generation"] for entry in history] == [0, 1, 2, 1, 0, 3, 0]
    moved = served.rename(tmp_path / "moved")  # nothing in it depends on its place
    assert _current(moved) == names[0]


def test_a_bundle_that_is_worse_is_refused(
    bundles: list[Path], sample: Path, served: Path, caplog, capsys
) -> None:
    flags = ["--to", str(served), "--sample", str(sample)]
    assert main(["publish", str(bundles[0]), *flags]) == 0
    out = capsys.readouterr().out
    assert "served" not in out.splitlines()[1]  # there is nothing to compare with
    better = ["--max_auroc_drop", "0.001", "--max_calibration_change", "100"]
    assert main(["publish", str(bundles[1]), *flags, *better]) == 3
    assert "refused: AUROC falls by 0." in caplog.text
    assert "more than --max_auroc_drop 0.001" in caplog.text
    assert "calibration" not in caplog.text
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines()] == [
        "rows", "served", "new", "change", f"{served}:"
    ]  # fmt: skip
    caplog.clear()
    calibrated = ["--max_auroc_drop", "1", "--max_calibration_change", "0.0001"]
    assert main(["publish", str(bundles[1]), *flags, *calibrated]) == 3
    assert "the calibration error grows by 0." in caplog.text
    assert "AUROC" not in caplog.text
    assert _current(served) == _name(bundles[0])
    assert _stored(served) == {_name(bundles[0])}
    loose = ["--max_auroc_drop", "1", "--max_calibration_change", "100", "--sample_rows", "500"]
    assert main(["publish", str(bundles[1]), *flags, *loose]) == 0
    assert _current(served) == _name(bundles[1])
    assert main(["publish", str(bundles[0]), *flags]) == 0  # better: no limit is in its way
    metrics = read_json(served / "history.json", "a history")["entries"][1]["metrics"]
    assert metrics["samples"] == 500
    labels = np.loadtxt(sample, usecols=0, max_rows=500, delimiter="\t")
    assert metrics["positives"] == labels.sum()


def test_an_earlier_generation_is_refused(tmp_path: Path, served: Path, capsys) -> None:
    old = make_bundle(tmp_path / "old", seed=1)
    digest = read_json(old / "bundle.json", "a bundle")["workflow_digest"]
    new = make_bundle(tmp_path / "new", seed=2, generation=1, parent=digest)
    refitted = make_bundle(tmp_path / "refitted", seed=3)
    for bundle in (old, new):
        assert main(["publish", str(bundle), "--to", str(served)]) == 0
    assert main(["publish", str(old), "--to", str(served), "--json"]) == 3
    done = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (done["name"], done["before"]) == (_name(old), _name(new))
    assert (
        "its workflow is of generation 0, the served bundle's of generation 1"
        in done["refusals"][0]
    )
    assert _current(served) == _name(new)
    assert main(["publish", str(old), "--to", str(served), "--allow_older"]) == 0
    assert _current(served) == _name(old)
    publish(new, served)
    assert publish(refitted, served).refusals == ()  # its generation 0 is of another line


@pytest.mark.parametrize(
    ("rows", "message"),
    [("", "no rows|empty"), ("0\t1\t\ta\t1\n" * 9, "the first 9 rows have the same value")],
)
def test_samples_that_tell_nothing(
    bundles: list[Path], tmp_path: Path, capsys, rows: str, message: str
) -> None:
    (tmp_path / "day_3").write_text(rows)
    flags = ["--to", str(tmp_path / "served"), "--sample", str(tmp_path / "day_3")]
    assert main(["publish", str(bundles[0]), *flags]) == 2
    error = capsys.readouterr().err
    assert any(part in error for part in message.split("|")), error
    assert not (tmp_path / "served" / "current").exists()


def test_old_bundles_are_removed(bundles: list[Path], served: Path) -> None:
    for bundle in bundles:
        publish(bundle, served)
    names = [_name(bundle) for bundle in bundles]
    rollback(served)
    assert _stored(served) == set(names)
    removed = publish(bundles[0], served, keep=1).removed  # its line is 0, 1, 2, 0
    assert removed == tuple(sorted((names[1], names[3])))
    assert _stored(served) == {names[0], names[2]}  # that served before is needed to roll back
    rollback(served)
    assert _current(served) == names[2]
    with pytest.raises(OutputError, match="no earlier bundle exists"):
        rollback(served)
    assert _current(served) == names[2]
    publish(bundles[3], served)
    assert publish(bundles[3], served, keep=2).removed == (names[0],)  # though served already


def test_only_published_bundles_are_removed(
    bundles: list[Path], tmp_path: Path, served: Path, caplog
) -> None:
    """What else somebody keeps there stays as it is, and is in the way of no command."""
    publish(bundles[0], served)
    directory = served / "bundles"
    elsewhere = directory.rename(tmp_path / "elsewhere")  # to which a link may lead
    directory.symlink_to(elsewhere)
    photos = ("photos", "0123456789ab", ".photos.tmp")
    for name in photos:
        (directory / name).mkdir()
        (directory / name / "a.jpg").touch()
    (directory / "abcdefabcdef").symlink_to(tmp_path)
    stray = ("notes.txt", ".notes.old.tmp", ".0123456789ab.old.tmp")
    for name in stray:
        (directory / name).touch()
    before = _stored(served)
    for bundle in bundles[1:]:
        publish(bundle, served)
    assert publish(bundles[3], served, keep=2).removed == tuple(sorted(map(_name, bundles[:2])))
    rollback(served)
    assert _stored(served) == (before | {*map(_name, bundles[2:])}) - {_name(bundles[0])}
    assert all((directory / name / "a.jpg").exists() for name in photos)
    assert "did not remove 0123456789ab, abcdefabcdef, notes.txt, photos" in caplog.text


def test_damage(bundles: list[Path], sample: Path, tmp_path: Path, served: Path, capsys) -> None:
    publish(bundles[0], served)
    bad = shutil.copytree(bundles[1], tmp_path / "bad")
    flip_bit(bad / "weights" / "table.npy", -1)
    with pytest.raises(BadInputError, match=r"bad/weights/table.npy: not the file"):
        publish(bad, served)
    with pytest.raises(BadInputError, match="no such file"):
        publish(tmp_path / "none", served)
    assert _stored(served) == {_name(bundles[0])}

    flip_bit(served / "current" / "weights" / "table.npy", -1)
    flags = ["--to", str(served), "--sample", str(sample)]
    assert main(["publish", str(bundles[1]), *flags]) == 2
    error = capsys.readouterr().err
    assert "the served bundle is damaged" in error
    assert "publish another bundle without --sample" in error
    assert main(["publish", str(bundles[0]), "--to", str(served)]) == 2  # the same as the damaged
    publish(bundles[1], served)
    assert _current(served) == _name(bundles[1])
    with pytest.raises(BadInputError, match=r"/table\.npy: not the file"):
        rollback(served)
    assert _current(served) == _name(bundles[1])
    publish(bundles[0], served)  # takes the place of the damaged copy
    assert _current(served) == _name(bundles[0])


def test_directories_of_something_else(bundles: list[Path], tmp_path: Path) -> None:
    file, other = tmp_path / "file", tmp_path / "other"
    file.write_text("")
    other.mkdir()
    (other / "manifest.json").write_text("{}")
    with pytest.raises(BadInputError, match="is not a directory"):
        publish(bundles[0], file)
    with pytest.raises(OutputError, match=r"contains manifest.json but no history.json"):
        publish(bundles[0], other)
    assert os.listdir(other) == ["manifest.json"]
    with pytest.raises(BadInputError, match="does not exist"):
        rollback(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(OutputError, match="no earlier bundle exists"):
        rollback(tmp_path / "empty")

    served = tmp_path / "served"
    publish(bundles[0], served)
    with locked(served / ".lock", served):
        for change in (lambda: publish(bundles[1], served), lambda: rollback(served)):
            with pytest.raises(OutputError, match="another run is writing here"):
                change()
    (served / "current").unlink()
    publish(bundles[1], served)  # somebody removed the link
    with pytest.raises(SchemaError, match="bundle's: cat_1 has another position"):
        publish(make_bundle(tmp_path / "narrow", columns=1), served)
    (served / "current").unlink()
    for target in (bundles[0], "bundles/..", "bundles/day-1"):
        (served / "current").unlink(missing_ok=True)
        (served / "current").symlink_to(target)
        for change in (lambda: publish(bundles[1], served), lambda: rollback(served)):
            with pytest.raises(OutputError, match="not a link to a bundle in"):
                change()
    (served / "current").unlink()
    (served / "current").mkdir()
    with pytest.raises(OutputError, match="not a link to a bundle in"):
        publish(bundles[1], served)


def test_histories_with_anything_in_them(bundles: list[Path], served: Path) -> None:
    publish(bundles[0], served)
    publish(bundles[1], served)

    def publish_again() -> None:
        try:
            publish(bundles[2], served)
        finally:
            assert _current(served) in {_name(bundle) for bundle in bundles}

    expect_own_errors(served / "history.json", publish_again, rounds=40)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "nothing to publish"),
        (["x", "--rollback"], "a bundle and --rollback"),
        (["--rollback", "--keep", "3"], "--keep and --rollback are both set"),
        (["x", "--max_auroc_drop", "0.1"], "--max_auroc_drop 0.1 has no effect without --sample"),
    ],
)
def test_flags(tmp_path: Path, capsys, flags: list[str], message: str) -> None:
    assert main(["publish", *flags, "--to", str(tmp_path / "served")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "served").exists()


def test_ended_anywhere_a_whole_bundle_is_served(bundles: list[Path], tmp_path: Path) -> None:
    seen = seen_by("tests.inference.killed_publish", *bundles[:2], tmp_path)
    for moments, both_were_served in seen:
        assert moments > 5
        assert both_were_served
