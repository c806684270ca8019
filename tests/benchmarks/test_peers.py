"""The programs for the peers do the same work as ours; where `make bench-etl` has built them."""

import json
from pathlib import Path

import pytest

from benchmarks.etl import systems
from benchmarks.etl.systems import DUCKDB, POLARS, Log
from benchmarks.etl.verify import compare
from benchmarks.process import run as measured
from nvt_torchrec.etl.run import run
from tests.etl.runs import settings
from tests.logs import CRITEO, write_log


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Log:
    directory = tmp_path_factory.mktemp("log")
    write_log(directory / "raw", [200, 100, 61])
    run(settings(directory / "raw", directory / "ours"))
    return Log(directory / "raw", 361, directory, 2)


@pytest.mark.parametrize(
    ("peer", "flags", "output"),
    [
        (POLARS, ["--stage", "memory"], systems.frames_output),
        (POLARS, ["--stage", "disk"], systems.frames_output),
        (DUCKDB, ["--threads", "2"], systems.frames_output),
    ],
)
def test_a_peer_writes_what_we_write(log: Log, peer, flags: list[str], output):
    if not peer.python.exists():
        pytest.skip(f"{peer.directory} is not built")
    system = systems.peer(log, peer, "peer", *flags, case=" ".join([peer.name, *flags]))
    one = measured(system.command, env=system.env)
    assert not one.error
    ours = systems.our_output(log.work / "ours")
    theirs = output(systems.output_of(log, system.name, system.case))
    columns = CRITEO.label, CRITEO.dense_names, CRITEO.categorical_names
    summary = compare(ours, theirs, *columns, same_order=peer is not DUCKDB)
    assert summary.rows == 361
    assert summary.null
    assert summary.oov


def test_our_command_is_the_product_itself(log: Log):
    system = systems.ours(log, "cpu", "ours cpu", "TSV to parquet")
    one = measured(system.command, result=system.result)
    assert one.output == {"rows": 361}
    compared = compare(
        systems.our_output(log.work / "ours"),
        systems.our_output(systems.output_of(log, "ours cpu", "TSV to parquet")),
        CRITEO.label,
        CRITEO.dense_names,
        CRITEO.categorical_names,
    )
    assert compared.rows == 361


@pytest.mark.parametrize("part", ["read", "parse", "write"])
def test_limits_print_rows_per_second(log: Log, part: str):
    system = systems.limit(log, part, log.work / "ours")
    one = measured(system.command, cwd=Path(__file__).parents[2])
    assert not one.error
    assert one.output["rows_per_s"] > 0
    assert json.dumps(one.output)
    assert not (log.work / "ours" / "written_again").exists()
