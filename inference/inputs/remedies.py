"""What to do about rows that a served workflow refuses.

Its spec is fixed: a key of the spec takes effect with another ETL run and training only. So a
remedy says first what can be passed instead. Both are named only after they were tried: the value
is converted again with the keys, and what to pass instead with the spec as it is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from nvt_torchrec.base.errors import BadInputError, SchemaError
from nvt_torchrec.clicklog.text.convert import Converted
from nvt_torchrec.formats.spec.feature_spec import FeatureSpec
from nvt_torchrec.formats.spec.reading import Read
from nvt_torchrec.formats.spec.times import EPOCHS, time_text
from nvt_torchrec.inference.errors import InvalidRowError
from nvt_torchrec.inference.inputs.columns import convert_values
from nvt_torchrec.inference.inputs.rules import read_as_text
from nvt_torchrec.inference.inputs.trial_keys import keys_that_take
from nvt_torchrec.inference.inputs.values import is_missing

#: Longer values are not looked at: a remedy would repeat them.
_MOST_TEXT = 200
_SPEC = "the spec"
_WITH_NEW_RUN = "with another ETL run and training"
_NULL = "null if it means a missing value"


@contextlib.contextmanager
def of_fitted_spec() -> Iterator[None]:
    """Say in errors about a file that the spec whose keys they name is that of a workflow."""
    try:
        yield
    except (BadInputError, SchemaError) as error:
        error.remedy = say_fitted(error.remedy)
        error.args = error.what, error.remedy
        raise


def say_fitted(remedy: str) -> str:
    """Add to a remedy that names keys of the spec when they take effect."""
    if _SPEC not in remedy:
        return remedy
    return f"{remedy}; its keys take effect {_WITH_NEW_RUN}: until then, write files as it says"


def with_remedy(error: InvalidRowError, rows: Any, spec: FeatureSpec) -> InvalidRowError:
    """Return the error of a value in rows in memory, with what to do about it.

    Args:
        error: raised by :mod:`.values`, :mod:`.columns` or :mod:`.frames`.
        rows: the rows, as they were passed.
        spec: their columns.
    """
    try:
        value = _value(rows, error.row, error.column)
    except (LookupError, TypeError, ValueError):  # a column that yields its values once
        return error
    reads = spec.read_plan(label=False).reads
    text = error.column in read_as_text(reads)
    for read in reads:
        if read.source == error.column and not _takes(value, read, text=text):
            remedy = remedy_of(value, read, text=text)
            return InvalidRowError(error.row, error.column, error.reason, remedy)
    return error


def warm_up(spec: FeatureSpec) -> None:
    """Compile or load what remedies need, which takes seconds on a new machine."""
    reads = {read.raw: read for read in spec.read_plan(label=False).reads}
    for read in reads.values():
        for value in _WARM_UP:
            remedy_of(value, dataclasses.replace(read, multi_hot=False), text=True)


#: Values of which each is refused by most columns.
_WARM_UP = ("1,000x", "?", " 1 ", 1.5)


def _value(rows: Any, row: int, column: str) -> Any:
    found = rows[row][column] if isinstance(rows, list | tuple) else _at(rows[column], row)
    return found.as_py() if hasattr(found, "as_py") else found  # Arrow's scalars


def _at(column: Any, row: int) -> Any:
    """Return a value of a column by its place; pandas' indexes are by label."""
    return column.iloc[row] if hasattr(column, "iloc") else column[row]


def remedy_of(value: Any, read: Read, *, text: bool = False) -> str:
    """Return what to do about a value that is not taken; "" if there is nothing to say.

    Args:
        value: the value, as it was passed.
        read: how the column is read.
        text: whether strings are taken as fields of text, see
            :func:`inference.inputs.rules.read_as_text`.
    """
    if read.multi_hot:
        return _remedy_of_list(value, read, text)
    written = _written(value)
    if not written or len(written) > _MOST_TEXT or not written.replace("\t", " ").isprintable():
        return ""
    found = () if _takes(written, read, text=True) else keys_that_take(written, read)
    helping = (both for both in found if _takes(value, both[1], text=text))
    keys, changed = next(helping, ("", read))
    instead = (one for one in _instead(written, changed, read) if _takes(one, read, text=text))
    advice = [f"pass {_shown(one, read)}" for one in itertools.islice(instead, 1)]
    if keys:
        advice.append(
            f"set {keys} for column {read.source} in {_SPEC}, which takes effect {_WITH_NEW_RUN}"
        )
    if not advice and not any(character.isdigit() for character in written):
        advice.append(f"pass {_NULL}")
    return ", or ".join(advice)


def _shown(value: Any, read: Read) -> str:
    """Return a value to pass instead of another, as JSON has it."""
    if value is None:
        return _NULL
    meant = " if it means that time" if read.raw == "time" else ""
    return f"{json.dumps(value, ensure_ascii=False)}{meant}"


def _remedy_of_list(value: Any, read: Read, text: bool) -> str:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        written = _written(value)
        if not written or len(written) > _MOST_TEXT:
            return ""
        item = dataclasses.replace(read, multi_hot=False)
        for one in (written, *_instead(written, item, item)):
            if _takes([one], read, text=text):
                return f"pass a list of its values, such as {json.dumps([one])}"
        return ""
    item = dataclasses.replace(read, multi_hot=False)
    for one in value:
        if is_missing(one):
            return "leave missing values out of the list"
        if not _takes(one, item, text=text):
            found = remedy_of(one, item, text=text)
            return found.replace(_NULL, "a list without it if it means a missing value")
    return ""


def _takes(value: Any, read: Read, *, text: bool) -> bool:
    converted = _convert(value, read, text)
    return converted is not None and not converted.code.any()


def _convert(value: Any, read: Read, text: bool) -> Converted | None:
    try:
        return convert_values([value], read, text=text)
    except InvalidRowError:
        return None


def _written(value: Any) -> str:
    """Return a value as a log has it; "" for values that are neither text nor numbers."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, bool | np.bool_):
        return ""
    if isinstance(value, int | float | np.integer | np.floating):
        return str(value.item() if isinstance(value, np.generic) else value)
    return ""


def _instead(written: str, changed: Read, read: Read) -> Iterator[Any]:
    """Yield what may be passed instead of a value, which is taken if it is read as ``changed``."""
    converted = _convert(written, changed, True)
    if changed.raw == read.raw and converted is not None and not converted.code[0]:
        if converted.missing[0]:
            yield None
            return
        found = converted.values[0]
        if read.raw == "time":
            written = time_text(int(found), read.time_format)
            yield json.loads(written) if read.time_format in EPOCHS else written
        elif read.raw in ("hex32", "string"):
            yield written.strip(" \t")
        else:
            number = found.item()
            yield int(number) if float(number).is_integer() else number
