"""Command lines made of dataclasses."""

from __future__ import annotations

import dataclasses
import math
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from nvt_torchrec.base.command_line import (
    Parser,
    Settings,
    add_arguments,
    flag,
    parse,
)
from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.base.subcommands import run_subcommand
from nvt_torchrec.etl.settings import EtlSettings
from nvt_torchrec.training.settings.train_settings import TrainSettings

ROOT = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Job(Settings):
    """Fields of every kind."""

    OTHER_PROGRAMS = "page.md"
    LEFT_OUT = frozenset({"--sources"})

    source: Path = flag("what to read", positional=True, metavar="SOURCE")
    rows: int = flag("rows of a batch", 32, minimum=1, aliases=("lines",))
    share: float | None = flag("share of the rows", None, above=0, maximum=1)
    wait: float = flag("seconds", 5.0, above=0, maximum=math.inf)
    weight: float = flag("weight of a row", 1.0, above=0)
    shift: float = flag("added to each value", 0.0)
    sizes: tuple[int, ...] = flag("layers", (4,) * 6, minimum=1)
    columns: tuple[str, ...] = flag("columns", ())
    kind: str = flag(
        "100 % of the kinds", "plain", choices=("plain", "mixed"), aliases=("mix mixed",)
    )
    mixture: int | None = flag("parts of a mixture", None, needs="--kind mixed")
    quiet: bool = flag("print nothing", False)
    level: int | None = flag("level of silence", None, needs="--quiet")
    made: frozenset[str] = flag("letters", frozenset, parse=frozenset)
    computed: int = flag("cores", lambda: 4)
    not_a_flag: int = 7


@dataclasses.dataclass(frozen=True)
class Other(Settings):
    """A second dataclass of the same command line."""

    output: Path = flag("what to write", metavar="OUT")
    part: int | None = flag("which part of it", None, minimum=0, metavar="PART", positional=True)


def parsed(line: str) -> Job:
    return parse(Parser(prog="job"), shlex.split(line), Job)[0]


@pytest.mark.parametrize(
    ("settings", "values", "name"),
    [
        (EtlSettings, ("log.csv", ""), "--output_path"),
        (EtlSettings, ("", "OUT"), "--input_path"),
        (TrainSettings, ("train", ""), "--binary_path"),
    ],
)
def test_paths_that_are_empty(settings, values, name):
    """As of a variable that the shell does not know: the ETL wrote to where it was started."""
    with pytest.raises(SettingsError, match=f"{name} is empty\n  -> give a value"):
        settings(*values)


def test_defaults_are_those_of_the_dataclass():
    assert parsed("in") == Job(Path("in"))


def test_values_have_the_types_of_the_fields():
    assert parsed(
        "--rows 3 --share 0.5 --wait inf --sizes 1,2 --columns 'a, b' --kind mixed --mixture 2 "
        "--quiet --level 1 --made abc in"
    ) == Job(
        Path("in"), 3, 0.5, math.inf, 1.0, 0.0, (1, 2), ("a", "b"), "mixed", 2, True, 1,
        frozenset("abc")
    )  # fmt: skip


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "arguments are required: SOURCE\n  -> see: job --help"),
        ("''", "source is empty\n  -> give a value"),  # not Path(".")
        ("in --kind ''", "--kind is empty\n  -> give a value"),
        ("in --rows many", "argument --rows: invalid int value: 'many'"),
        ("in --rows 0", "--rows 0\n  -> it must be at least 1"),
        ("in --share 2", "--share 2.0\n  -> it must be above 0 and at most 1"),
        ("in --weight inf", "--weight inf\n  -> it must be finite and above 0"),
        ("in --sizes 1,0", "--sizes 1,0\n  -> each number must be at least 1"),
        ("in --sizes 1,x", "'1,x' is not a comma-separated list of integers"),
        ("in --kind odd", "--kind odd\n  -> one of plain, mixed"),
        ("in --mixture 2", "--mixture 2 has no effect without --kind mixed\n  -> add --kind mixed"),
        ("in --level 2", "--level 2 has no effect without --quiet"),
        ("in --row 3", "unknown argument --row\n  -> did you mean --rows"),  # no abbreviations
        ("in --not_a_flag 3", "unknown argument --not_a_flag"),
        ("in -rows 3", "unknown argument -rows\n  -> it takes two dashes: --rows"),
        ("in --noquiet", "unknown argument --noquiet\n  -> remove it: a switch is off unless"),
        ("in --lines=2", "--lines\n  -> it is called --rows here (page.md)"),
        ("in --mix 2", "--mix\n  -> it is called --kind mixed here (page.md)"),
        ("in --sources 2", "--sources\n  -> it does not exist here; page.md says why"),
        ("in --nolines", "--nolines\n  -> remove it: a switch is off unless"),
        (
            "-rows 2 --row=3 --rows many",
            "unknown arguments -rows, --row\n  -> -rows: it takes two dashes: --rows\n"
            "  -> --row: did you mean --rows?",
        ),
    ],
)
def test_what_is_refused_and_what_to_do(line, message):
    with pytest.raises(SettingsError) as error:
        parsed(line)
    assert message in str(error.value)


@dataclasses.dataclass(frozen=True)
class Alternatives(Settings):
    days: int | None = flag("number of days", None, excludes=("hours",))
    hours: int | None = flag("number of hours", None)


def test_alternatives():
    assert Alternatives(days=3).hours is None
    with pytest.raises(SettingsError, match="--days and --hours are both set\n  -> give only one"):
        Alternatives(3, 0)


def test_settings_made_in_python_are_checked_alike():
    with pytest.raises(SettingsError, match="--kind odd\n  -> one of plain, mixed"):
        Job(Path("in"), kind="odd")
    with pytest.raises(SettingsError, match=r"--sizes \n  -> each number must be at least 1"):
        Job(Path("in"), sizes=())


def test_the_help_has_types_and_defaults():
    parser = Parser(prog="job")
    add_arguments(parser, Job, Other)
    text = " ".join(parser.format_help().split())
    for part in (
        "SOURCE what to read",
        "--rows N rows of a batch (default: 32)",
        "--sizes N,N,… layers (default: 4,4,4,4,4,4)",
        "--kind {plain,mixed} 100 % of the kinds (default: plain)",
        "--output OUT what to write",
    ):
        assert part in text
    assert "not_a_flag" not in text


def test_several_dataclasses_of_one_command_line():
    job, other = parse(Parser(prog="job"), ["in", "--output", "out"], Job, Other)
    assert (job.source, other) == (Path("in"), Other(Path("out")))
    assert parse(Parser(), ["in", "3", "--output", "out"], Job, Other)[1].part == 3


COMMANDS = {
    "one": ("tests.base.a_command", "the first"),
    "two": ("no.such.module", "is never imported"),
}


def test_only_the_subcommand_that_is_named_is_imported(capsys):
    assert run_subcommand("prog", "Does things.", COMMANDS, ["one", "--times", "3"]) == 3
    for line, message in (
        ([], "the following arguments are required: COMMAND"),
        (["three"], "invalid choice: 'three'"),
    ):
        with pytest.raises(SettingsError, match=message):
            run_subcommand("prog", "Does things.", COMMANDS, line)
    with pytest.raises(SystemExit) as end:
        run_subcommand("prog", "Does things.", COMMANDS, ["--help"])
    assert end.value.code == 0
    assert "the first" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        run_subcommand("prog", "Does things.", COMMANDS, ["one", "--help"])
    assert "A command for the tests." in capsys.readouterr().out


@pytest.mark.parametrize(
    "line",
    [
        "etl --help",
        "etl run --help",
        "etl check --help",
        "inference serve --help",
        "workflows inspect --help",
    ],
)
def test_help_imports_nothing_heavy(line):
    code = (
        "import runpy, sys\n"
        "sys.argv = sys.argv[1:]\n"
        "try: runpy.run_module(sys.argv[0], run_name='__main__')\n"
        "except SystemExit as end: assert not end.code\n"
        "heavy = {'torch', 'numba', 'pandas', 'dask', 'nvtabular', 'uvicorn'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    command = [sys.executable, "-c", code, *line.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
