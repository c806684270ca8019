"""docs/nvtabular.md says of each operator what it does; ``operator_table`` has the cases."""

from __future__ import annotations

import inspect
import subprocess
import sys

import nvt_torchrec.nvt_compat  # noqa: F401

from nvtabular import ops

from tests.nvt_compat.operator_table import CASES
from tests.shell import ROOT


def test_the_table_is_true() -> None:
    text = (ROOT / "docs" / "nvtabular.md").read_text()
    written = [line for line in text.splitlines() if line.startswith("| ")]
    command = [sys.executable, "-m", "tests.nvt_compat.operator_table"]
    # in a process of its own: what other tests have imported or set changes some operators
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    printed = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    assert written == printed, f"{' '.join(command)} prints it"
    wrong = [line for line in written if "**" in line]
    assert not any(line.endswith("|  |") for line in wrong), (
        "say what is wrong, and the way round it"
    )


def test_each_operator_is_in_it() -> None:
    found = {
        name
        for name, operator in vars(ops).items()
        if inspect.isclass(operator) and issubclass(operator, ops.Operator | ops.StatOperator)
    }
    assert {case.operator for case in CASES} == found - {"Operator", "StatOperator"}
