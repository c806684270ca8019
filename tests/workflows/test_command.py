"""``python -m workflows inspect``."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.formats.feature_spec import CategoricalColumn, DenseColumn, FeatureSpec
from nvt_torchrec.workflows.__main__ import main
from nvt_torchrec.workflows.description import inspect
from nvt_torchrec.workflows.vocabulary import fit_vocabulary
from nvt_torchrec.workflows.writer import Fitted, write_workflow
from tests.mutations import flip_bit
from tests.shell import python

SPEC = FeatureSpec(
    label="label",
    dense=(DenseColumn("price", raw="float", fill=0.5), DenseColumn("int_0")),
    categorical=(
        CategoricalColumn("cat_0"),
        CategoricalColumn("cat_1", freq_threshold=3),
        CategoricalColumn("user", raw="int", max_table_size=7, num_buckets=3),
        CategoricalColumn("seen", raw="string", multi_hot=True, vocabulary="items"),
        CategoricalColumn("item", raw="string", vocabulary="items"),
        CategoricalColumn("city", raw="string", hash_buckets=10),
    ),
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def counted(values, counts, name, nulls):
        column = next(c for c in SPEC.categorical if c.vocabulary_name == name)
        return fit_vocabulary(values, np.array(counts), column, nulls)

    items = pa.array([f"item {i}" for i in range(200_000)])
    vocabularies = {
        "cat_0": counted(np.array([0x0A1B2C3D, 7]), [1, 5], "cat_0", 4),
        "cat_1": counted(np.array([1, 2, 3]), [2, 2, 9], "cat_1", 0),
        "user": counted(np.array([-5, 6, 1, 2]), [9, 8, 7, 6], "user", 1),
        "items": counted(items, 200_000 - np.arange(200_000), "items", 2),
        "city": counted(pa.array([], pa.string()), [], "city", 0),
    }
    statistics = {"price": {"mean": 1.5, "std": 0.25}, "int_0": {"mean": 2.0, "std": 1.0}}
    path = tmp_path_factory.mktemp("workflow") / "workflow"
    write_workflow(path, SPEC, Fitted(statistics, vocabularies))
    return path


def test_the_rows_of_a_vocabulary_are_its_ids(saved: Path) -> None:
    """As README says: the first has the id that follows those of ``out of vocabulary``."""
    columns = SPEC.categorical
    for name, ids, values in (("cat_0", [3, 4], [7, 0x0A1B2C3D]), ("user", [5], [-5])):
        file = saved / inspect(saved).vocabularies[name].file
        column = next(c for c in columns if c.name == name)
        there = pq.read_table(file)[name].to_pylist()
        assert [there[number - column.reserved_ids] for number in ids] == values


def test_a_damaged_vocabulary_is_named(saved: Path, tmp_path: Path) -> None:
    """Of the same size, so that only its page checksum tells."""
    copy = shutil.copytree(saved, tmp_path / "workflow")
    file = copy / inspect(copy).vocabularies["cat_1"].file
    page = pq.read_metadata(file).row_group(0).column(0)
    flip_bit(file, page.data_page_offset + page.total_compressed_size - 1)
    with pytest.raises(BadInputError, match=r"unique.cat_1.parquet: damaged: .*CRC"):
        inspect(copy).read_values(SPEC.categorical[1])


def test_inspect(saved: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["inspect", str(saved)]) == 0
    shown = capsys.readouterr().out
    lines = {line.split()[0]: " ".join(line.split()) for line in shown.splitlines() if line}
    assert lines["digest"] == f"digest {inspect(saved).digest}"
    assert lines["cat_1"] == "cat_1 hex32 cat_1 1 4 seen >= 3 times id 2 0 4"
    assert lines["user"] == "user int user 2 7 table <= 7 ids 2 to 4, by hash 1 13"
    assert lines["seen"].startswith("seen list of string items 200000 200003 all seen id 2 2 0")
    assert lines["city"] == "city string - 0 12 none: all hashed ids 2 to 11, by hash - -"
    assert lines["price"] == "price float 0.5 (log(max(x, -2) + 3) - mean) / std 1.5 0.25"
    sizes = "5,4,7,200003,200003,12"
    assert lines["--num_embeddings_per_feature"] == f"--num_embeddings_per_feature {sizes}"
    size = sum(f.stat().st_size for f in saved.rglob("artifacts/**/*") if f.is_file())
    assert f"{size / 2**20:.1f} MiB" in shown
    assert main(["inspect", str(saved / "nothing")]) == 2


def test_it_imports_nothing_heavy(saved: Path) -> None:
    code = (
        "import sys; from nvt_torchrec.workflows.__main__ import main;"
        "main(['inspect', sys.argv[1]]);"
        "print([m for m in ('nvtabular', 'dask', 'pandas', 'torch', 'numba') if m in sys.modules])"
    )
    done = python("-c", code, saved)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
