"""Measured runs: time, memory and failures of real processes, medians and ratios of them."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

from benchmarks import harness
from benchmarks.harness import CPU, MEMORY, WALL, Metric, System, Table
from benchmarks.process import run
from nvt_torchrec.base.errors import ClickLogError

SPEED = Metric("n_per_s", "n/s", ratio=True)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def printing(text: str = "{}", before: str = "") -> list[str]:
    return python(f"{before}\nprint('noise')\nprint({text!r})")


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Table:
    monkeypatch.setattr(harness, "BUILD", tmp_path)
    return Table("try", "a try", [SPEED, WALL, MEMORY], base="b")


def test_a_run_has_the_last_line_the_time_and_the_memory():
    code = "import time; x = bytearray(80 << 20); sum(x[::4096]); time.sleep(0.5)"  # to be seen
    one = run(printing('{"rows": 3}', code))
    assert one.output == {"rows": 3}
    assert not one.error
    assert 80 * 2**20 / 1e6 < one.peak_rss_mb < 150
    assert 0 < one.cpu_s < one.wall_s + 1


def test_memory_and_cpu_are_those_of_all_processes():
    child = (
        "import sys, time; x = bytearray(60 << 20); x[::4096] = b'1' * len(x[::4096])\n"
        "while time.process_time() < 0.3: pass\n"
        "print(flush=True); sys.stdin.read()"
    )
    start = (
        "import subprocess, sys, time\n"
        f"command = [sys.executable, '-c', {child!r}]\n"
        "children = [subprocess.Popen(command, stdin=-1, stdout=-1) for _ in range(2)]\n"
        "[child.stdout.readline() for child in children]; time.sleep(2)  # both are to be seen\n"
        "[child.communicate() for child in children]"
    )
    one = run(printing(before=start))
    assert one.peak_rss_mb > 2 * 60 * 2**20 / 1e6
    assert one.cpu_s > 0.6


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (python("raise SystemExit('no such thing')"), "no such thing"),
        (python("import os; os.abort()"), "exit status -6"),
    ],
)
def test_a_failed_run_says_why(command: list[str], said: str):
    one = run(command)
    assert said in one.error
    assert one.output == {}


def test_a_run_past_its_time_is_killed():
    one = run(python("import time; time.sleep(10_000)"), timeout=0.5)
    assert re.search(r"killed after \d+ s", one.error)


def test_medians_ratios_and_the_order_of_runs(table: Table, tmp_path: Path):
    order = tmp_path / "order"

    def system(name: str, speeds: list[int]) -> System:
        code = (
            f"import json\nwith open({str(order)!r}, 'a') as f: f.write({name!r})\n"
            f"n = open({str(order)!r}).read().count({name!r})\n"
            f"print(json.dumps({{'n_per_s': {speeds!r}[n - 1], 'versions': {{{name!r}: '1'}}}}))"
        )
        return System(name, "", python(code))

    table.measure([system("a", [30, 10, 20]), system("b", [60, 80, 40])], repeats=3)
    assert order.read_text() == "ababab"
    assert table.median("a", "", "n_per_s") == 20
    assert table.ratio("a", "", "n_per_s") == 0.5  # of 0.5, 0.125, 0.5: not 20 / 60
    assert table.ratio("b", "", "n_per_s") == 1
    lines = table.text().splitlines()
    assert "medians of 3 interleaved runs" in lines[0]
    assert lines[3].split() == ["system", "n/s", "x", "b", "wall", "s", "peak", "MB"]
    assert lines[5].split()[:3] == ["a", "20", "0.50"]
    assert table.finish() == 0
    written = json.loads((tmp_path / "try.json").read_text())
    assert f" {len(os.sched_getaffinity(0))} cores, " in written["table"][1]
    own = [run for run in written["results"] if run["system"] == "a"]
    assert [run["output"]["n_per_s"] for run in own] == [30, 10, 20]
    assert own[0]["output"]["versions"] == {"a": "1"}
    assert own[0]["peak_rss_mb"] > 0


def test_a_failing_system_stays_in_the_table_and_is_not_run_again(table: Table, tmp_path: Path):
    count = tmp_path / "count"
    code = f"open({str(count)!r}, 'a').write('x'); raise SystemExit('out of luck')"

    def refuse() -> None:
        raise ClickLogError("cannot be installed: no network", "get one")

    table.measure(
        [
            System("a", "", python(code)),
            System("b", "", printing('{"n_per_s": 1}')),
            System("c", "", printing(), prepare=refuse),
        ],
        repeats=3,
    )
    assert count.read_text() == "x"
    assert table.failed == {("a", ""): "out of luck", ("c", ""): "cannot be installed: no network"}
    assert "failed: a: out of luck" in table.text()
    assert table.finish() == 1
    written = json.loads((tmp_path / "try.json").read_text())["results"]
    assert [run["system"] for run in written if run["error"]] == ["a", "c"]
    table.fail("b", "", "its output differs")  # found void later
    assert table.median("b", "", "n_per_s") is None
    assert "failed: b: its output differs" in table.text()


def test_speed_from_rows_and_results_from_files(table: Table, tmp_path: Path):
    file = tmp_path / "result.json"
    write = python(f"import time; time.sleep(0.3); open({str(file)!r}, 'w').write('hello')")
    table.metrics = (Metric("rows_per_s", "rows/s"), CPU)

    table.measure(
        [
            System(
                "a", "", write, result=lambda: {"rows": 100, "text": file.read_text()}, repeats=1
            ),
            System("b", "", printing('{"rows": 50}', before="import time; time.sleep(0.3)")),
            System("c", "", printing('{"rows": 50, "rows_per_s": 7}')),
        ],
        repeats=2,
    )
    assert [len(runs) for runs in table.runs.values()] == [1, 2, 2]  # "a" is slow
    assert "medians of 1-2 interleaved runs" in table.text()
    assert table.runs["a", ""][0].output["text"] == "hello"
    for name, rows in (("a", 100), ("b", 50)):
        walls = table.values(name, "", "wall_s")
        expected = [rows / wall for wall in walls]
        assert table.values(name, "", "rows_per_s") == pytest.approx(expected)
    assert table.median("c", "", "rows_per_s") == 7
