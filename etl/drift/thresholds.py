"""The thresholds of drift: how much may change before a day is flagged, from a TOML file."""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.formats.spec.feature_spec import FeatureSpec


@dataclasses.dataclass(frozen=True)
class ColumnThresholds:
    """The thresholds of a column; infinity switches one off.

    Attributes:
        psi: The largest population stability index. By convention 0.1 to 0.25 is a moderate shift.
        missing_rate: The largest change of the share of rows without a value, up or down.
        unseen_share: The largest increase of the share of values that are out of vocabulary.
    """

    psi: float = 0.2
    missing_rate: float = 0.05
    unseen_share: float = 0.05


@dataclasses.dataclass(frozen=True)
class Thresholds:
    """All thresholds.

    Attributes:
        default: Those of the columns that have none of their own.
        columns: Those of some columns, by name.
        label_rate: The largest relative change of the label rate, beyond the range of the days
            that were counted.
        malformed_share: The largest increase of the share of malformed rows.
        false_alarm_rate: The probability that a day without any drift is flagged by chance, over
            all measures together. It matters for small days only: in large ones chance changes
            less than the thresholds.
    """

    default: ColumnThresholds = dataclasses.field(default_factory=ColumnThresholds)
    columns: dict[str, ColumnThresholds] = dataclasses.field(default_factory=dict)
    label_rate: float = 0.2
    malformed_share: float = 0.01
    false_alarm_rate: float = 0.01

    def of(self, column: str) -> ColumnThresholds:
        """Return the thresholds of a column."""
        return self.columns.get(column, self.default)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready form; None stands for infinity, which JSON does not have."""
        return _without_infinity(dataclasses.asdict(self))


def _without_infinity(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_infinity(item) for key, item in value.items()}
    return None if value == float("inf") else value


def load_thresholds(path: Path, spec: FeatureSpec) -> Thresholds:
    """Read thresholds from a TOML file; what it does not set keeps its default.

    The file::

        label_rate = 0.2              # all keys are optional
        malformed_share = 0.01
        false_alarm_rate = 0.01

        [default]                     # of all columns
        psi = 0.2
        missing_rate = 0.05
        unseen_share = 0.05

        [columns.cat_3]               # of one column; the rest is as in [default]
        psi = 0.5
        unseen_share = inf            # never

    Args:
        path: The file.
        spec: The columns there are.

    Raises:
        SettingsError: The file is missing or not TOML, a key or a column is unknown, or a value is
            not a number of its range.
    """
    try:
        value = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SettingsError(
            f"{path}: cannot be read as thresholds: {error}", "see docs/drift.md for its form"
        ) from error
    whole = _names(Thresholds) - {"default", "columns"}
    _check_keys(value, whole | {"default", "columns"}, f"{path}")
    default = _column(value.get("default", {}), ColumnThresholds(), f"{path}: default", {})
    tables = value.get("columns", {})
    kinds = dict.fromkeys(spec.dense_names, "dense")
    kinds |= {column.name: _kind(column.hash_buckets) for column in spec.categorical}
    _check_keys(tables, kinds, f"{path}: columns", what="column")
    columns = {
        name: _column(table, default, f"{path}: columns.{name}", {"kind": kinds[name]})
        for name, table in tables.items()
    }
    numbers = {key: _number(value[key], f"{path}: {key}") for key in whole & value.keys()}
    rate = numbers.get("false_alarm_rate", Thresholds.false_alarm_rate)
    if not 0 < rate < 1:
        raise SettingsError(f"{path}: false_alarm_rate = {rate}", "give a number between 0 and 1")
    return Thresholds(default, columns, **numbers)


def _kind(hash_buckets: int) -> str:
    return "hashed" if hash_buckets else "categorical"


def _column(
    table: Any, default: ColumnThresholds, where: str, column: dict[str, str]
) -> ColumnThresholds:
    _check_keys(table, _names(ColumnThresholds), where)
    kind = column.get("kind", "categorical")
    if "unseen_share" in table and kind != "categorical":
        raise SettingsError(
            f"{where}.unseen_share has no effect: the column is {kind} and has no vocabulary",
            "remove this key",
        )
    numbers = {key: _number(table[key], f"{where}.{key}") for key in table}
    return dataclasses.replace(default, **numbers)


def _number(value: Any, where: str) -> float:
    if type(value) not in (int, float) or not value >= 0:  # NaN is not
        raise SettingsError(f"{where} = {value!r}", "give a number of at least 0, or inf for never")
    return float(value)


def _names(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def _check_keys(value: Any, allowed: Iterable[str], where: str, what: str = "key") -> None:
    allowed = sorted(allowed)
    if not isinstance(value, dict):
        raise SettingsError(
            f"{where} is {value!r:.60} instead of a table", f"known: {', '.join(allowed)}"
        )
    for key in value:
        if key not in allowed:
            close = difflib.get_close_matches(key, allowed, n=1)
            raise SettingsError(
                f"{where}: unknown {what} {key!r}",
                f"did you mean {close[0]!r}?" if close else f"known: {', '.join(allowed)}",
            )
