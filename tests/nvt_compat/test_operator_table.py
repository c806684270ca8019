"""docs/nvtabular.md says of each operator what it does; ``operator_table`` has the cases."""

from __future__ import annotations

import inspect

import nvt_torchrec.nvt_compat  # noqa: F401

from nvtabular import ops

from tests.nvt_compat.operator_table import CASES, table
from tests.shell import ROOT


def test_the_table_is_true() -> None:
    text = (ROOT / "docs" / "nvtabular.md").read_text()
    written = [line for line in text.splitlines() if line.startswith("| ")]
    assert written == table(), "python -m tests.nvt_compat.operator_table prints it"
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
