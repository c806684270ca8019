"""Labels that come from files other than the log, such as clicks that are logged separately."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.formats.feature_spec.columns import InputFormat
from nvt_torchrec.formats.feature_spec.events import DURATION, Events, parse_duration
from nvt_torchrec.formats.feature_spec.field_checks import check, format_choices
from nvt_torchrec.formats.feature_spec.raw_types.time import check_time_format
from nvt_torchrec.formats.feature_spec.read_plan import Read
from nvt_torchrec.formats.feature_spec.split import Split
from nvt_torchrec.formats.feature_spec.table_rules import is_inside


@dataclasses.dataclass(frozen=True)
class LabelFile:
    """The files of a label: a row of the log has label 1 if one of their rows belongs to it.

    A row of these files, called a click, belongs to the newest row of the log that has the same key
    and is not later than the click, if the click came within ``within`` after it.

    Attributes:
        name: The label.
        path: The files, relative to the directory of the log: a name or a glob. ``--label_path``
            overrides it.
        key: The columns of the log that hold the key. A column that is also a feature is read as
            that feature is.
        within: How long after a row a click may come, such as "1d".
        key_names: The columns of these files that hold the key, in the order of ``key``; () if
            they have the same names.
        time: The column of these files with the time of a click; "" if its name and format are
            those of the log's time.
        time_format: The format of ``time``, see :func:`.raw_types.time.check_time_format`.
        input: The format of the files; None to derive it from the ending of their names (text has a
            header).
        log_time: The column of the log with the time of a row; "" for the column of ``[events]`` or
            of a ``[split]`` by time.
        log_time_format: The format of ``log_time``.
    """

    name: str
    path: str
    key: tuple[str, ...]
    within: str
    key_names: tuple[str, ...] = ()
    time: str = ""
    time_format: str = ""
    input: InputFormat | None = None
    log_time: str = ""
    log_time_format: str = ""

    def __post_init__(self) -> None:
        names = self.file_key
        check(
            self,
            f"label {self.name}: ",
            ("path", self.path, 'name the files, such as from = "clicks*.csv"'),
            (
                "path",
                is_inside(self.path),
                f"write a path in the directory of the log, and pass --label_path {self.name}=PATH",
            ),
            ("key", self.key and all(self.key), 'name columns of the log, such as key = ["id"]'),
            ("key", len(set(self.key)) == len(self.key), "list each column once"),
            ("key_names", len(names) == len(self.key), "name one column for each column of key"),
            ("key_names", all(names) and len(set(names)) == len(names), "list each column once"),
            ("within", parse_duration(self.within), DURATION),
            ("time_format", self.time or not self.time_format, "add time, or remove time_format"),
            (
                "log_time_format",
                self.log_time or not self.log_time_format,
                "add log_time, or remove log_time_format",
            ),
        )
        check_time_format(self.time_format, f"label {self.name}: ")
        check_time_format(self.log_time_format, f"label {self.name}: ")

    @property
    def window(self) -> int:
        """Microseconds after a row within which a click may come."""
        return parse_duration(self.within)

    @property
    def file_key(self) -> tuple[str, ...]:
        """The columns of these files that hold the key."""
        return self.key_names or self.key

    def make_time_read(self, log_time: Read) -> Read:
        """Return how the time of a click is read.

        Args:
            log_time: How the time of a row of the log is read; the default.
        """
        if not self.time:
            return log_time
        return Read(self.time, "time", trim=True, time_format=self.time_format)


def check_label_files(
    files: Sequence[LabelFile], labels: Sequence[str], events: Events | None, split: Split
) -> None:
    """Check that each file belongs to a label of its own, and that rows have one time.

    Raises:
        SettingsError: A file has no label, a label has two paths, or rows have no time or several.
    """
    names = [file.name for file in files]
    for file in files:
        where = f"label {file.name}: "
        check(
            file,
            where,
            ("name", file.name in labels, format_choices(labels)),
            ("name", names.count(file.name) == 1, "write one block for each label"),
            (
                "log_time",
                not (events and file.log_time),
                "remove log_time: it is the time of [events]",
            ),
        )
        if not (file.log_time or events or split.by == "time"):
            raise SettingsError(
                f"{where}within = {file.within!r}, but rows of the log have no time",
                'name the column of the time, such as log_time = "time"',
            )
    if len({(file.log_time, file.log_time_format) for file in files}) > 1:
        raise SettingsError(
            "labels with different log_time, but a row has one time",
            "give all of them the same log_time and log_time_format",
        )
