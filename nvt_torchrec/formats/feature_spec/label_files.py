"""Labels from other files than the log: which rows were clicked, as files of clicks say later."""

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
    """The files that a label is from: a row of the log is 1 if one of their rows belongs to it.

    A row of these files, a click, belongs to the newest row of the log that has its key and is not
    after it, if it came within ``within``.

    Attributes:
        name: The label.
        path: The files, relative to the directory of the log: a name or a glob. A run may name
            others (``--label_path``).
        key: The columns of the log that hold the key; each is compared as its feature is read.
        within: How long after a row a click may come, such as "1d".
        key_names: The columns of the files with the key, in the order of ``key``; (): the same
            names.
        time: The column of the files with the time of a click; "": that of the log's time, read
            as it is.
        time_format: Of ``time``, see :func:`.raw_types.time.check_time_format`.
        input: The format of the files; None: by the ending of their names, text with a header.
        log_time: The column of the log with the time of a row; "": that of ``[events]`` or of a
            ``[split]`` by time.
        log_time_format: Its format.
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
            ("key", len(set(self.key)) == len(self.key), "a column stands there twice"),
            ("key_names", len(names) == len(self.key), "name a column for each one of the log"),
            ("key_names", all(names) and len(set(names)) == len(names), "name each column once"),
            ("within", parse_duration(self.within), DURATION),
            ("time_format", self.time or not self.time_format, "it is that of time"),
            ("log_time_format", self.log_time or not self.log_time_format, "it is of log_time"),
        )
        check_time_format(self.time_format, f"label {self.name}: ")
        check_time_format(self.log_time_format, f"label {self.name}: ")

    @property
    def window(self) -> int:
        """Microseconds within which a click may come."""
        return parse_duration(self.within)

    @property
    def file_key(self) -> tuple[str, ...]:
        """The columns of the files with the key."""
        return self.key_names or self.key

    def make_time_read(self, log_time: Read) -> Read:
        """Return how the time of a click is read, given how that of a row of the log is."""
        if not self.time:
            return log_time
        return Read(self.time, "time", trim=True, time_format=self.time_format)


def check_label_files(
    files: Sequence[LabelFile], labels: Sequence[str], events: Events | None, split: Split
) -> None:
    """Check that each file is of a label, and that rows have one time.

    Raises:
        SettingsError: One is not, or rows have no time, or several.
    """
    names = [file.name for file in files]
    for file in files:
        where = f"label {file.name}: "
        check(
            file,
            where,
            ("name", file.name in labels, format_choices(labels)),
            ("name", names.count(file.name) == 1, "a label is from the files of one path"),
            ("log_time", not (events and file.log_time), "leave it out: it is time of [events]"),
        )
        if not (file.log_time or events or split.by == "time"):
            raise SettingsError(
                f"{where}within = {file.within!r}, but rows have no time",
                'name it, such as log_time = "time"',
            )
    if len({(file.log_time, file.log_time_format) for file in files}) > 1:
        raise SettingsError(
            "labels with different log_time, and a row has one time", "name the same one in each"
        )
