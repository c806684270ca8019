"""The split of the rows into training, validation and test."""

from __future__ import annotations

import dataclasses

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.formats.feature_spec.field_checks import check, format_choices
from nvt_torchrec.formats.feature_spec.raw_types.time import check_time_format, parse_iso


@dataclasses.dataclass(frozen=True)
class Split:
    """The rule by which rows are divided into train, valid and test.

    Attributes:
        by: ``days``: the last day is halved into valid and test, all earlier days are train.
            ``share``: a seeded hash of a row's file and row number decides. ``column``: a seeded
            hash of a column's value decides, so that for example all rows of a user are in one
            split. ``time``: rows before one time are train, rows from another time on are test.
            ``files``: the names of the input files decide. ``values``: the texts of a column
            decide.
        valid: By share, column or time: the share of the rows for validation (by time, the rows
            just before those of test). By files or values: the share of the training rows that is
            held out for validation.
        test: By share, column or time: the share of the rows for test.
        seed: The seed of the hash.
        column: By column, time or values: the name of a column of the file, which need not be a
            feature.
        time_format: By time: the format of ``column``, see :func:`check_time_format`.
        valid_from: By time, instead of shares: when validation begins, as ISO 8601.
        test_from: By time, instead of shares: when test begins, as ISO 8601.
        train_files: By files: names or globs below the input directory of the training files.
        valid_files: By files: those of the validation files; () if ``valid`` is a share.
        test_files: By files: those of the test files.
        train_values: By values: the texts of the column in training rows.
        valid_values: By values: the texts in validation rows; () if ``valid`` is a share.
        test_values: By values: the texts in test rows.
    """

    by: str = "days"
    valid: float = 0
    test: float = 0
    seed: int = 0
    column: str = ""
    time_format: str = ""
    valid_from: str = ""
    test_from: str = ""
    train_files: tuple[str, ...] = ()
    valid_files: tuple[str, ...] = ()
    test_files: tuple[str, ...] = ()
    train_values: tuple[str, ...] = ()
    valid_values: tuple[str, ...] = ()
    test_values: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.by not in SPLIT_BY:
            raise SettingsError(f"split by {self.by!r}", format_choices(SPLIT_BY))
        self._check_unused()
        for name in ("valid", "test"):
            is_share = 0 <= getattr(self, name) < 1
            check(self, self._where, (name, is_share, "give a share of at least 0, less than 1"))
        check(
            self,
            self._where,
            ("seed", self.seed >= 0, "give an integer of at least 0"),
            (
                "column",
                self.column or "column" not in SPLIT_BY[self.by],
                'name a column, such as column = "user"',
            ),
        )
        self._check_shares_and_times()
        if self.by == "files":
            self._check_files()
        if self.by == "time":
            check_time_format(self.time_format, "split by time: ")
        if self.by == "values":
            self._check_values()
        if self.valid_from:
            valid_from = parse_iso(self.valid_from, "split: valid_from")
            test_from = parse_iso(self.test_from, "split: test_from")
            is_later = valid_from < test_from
            check(self, "split: ", ("valid_from", is_later, "give a later time as test_from"))

    @property
    def _where(self) -> str:
        return f"split by {self.by}: "

    def _check_unused(self) -> None:
        """Check that fields of other kinds of split have their defaults."""
        takes = SPLIT_BY[self.by]
        remedy = "remove it"
        if takes:
            keys = dict.fromkeys(map(spec_key, takes))
            remedy = f"remove it: this split takes {', '.join(keys)}"
        for field in dataclasses.fields(self):
            if field.name not in ("by", *takes):
                is_default = getattr(self, field.name) == field.default
                check(self, self._where, (field.name, is_default, remedy))

    def _check_shares_and_times(self) -> None:
        """Check that a split takes either both shares or both times, if it takes any."""
        both_times = bool(self.valid_from) == bool(self.test_from)
        times_only = not (self.valid_from and (self.valid or self.test))
        needs_shares = self.by in ("share", "column", "time") and not self.valid_from
        has_shares = self.valid > 0 and self.test > 0 and self.valid + self.test < 1
        remedy = f"give {_SHARES}"
        if self.by == "time":
            remedy += f"; or {_TIMES}"
        check(
            self,
            self._where,
            ("valid_from", both_times and times_only, f"give {_TIMES}; or {_SHARES}"),
            ("valid", has_shares or not needs_shares, remedy),
        )

    def _check_files(self) -> None:
        """Check the names of a split by files."""
        one_valid = bool(self.valid_files) != bool(self.valid)
        is_complete = self.train_files and self.test_files and one_valid
        paths = (*self.train_files, *self.valid_files, *self.test_files)
        is_below = not any(".." in path.split("/") for path in paths)
        check(
            self,
            self._where,
            ("train_files", is_complete, f"give {_FILES}"),
            ("train_files", is_below, "name files below the input directory"),
        )

    def _check_values(self) -> None:
        """Check the texts of a split by values."""
        one_valid = bool(self.valid_values) != bool(self.valid)
        texts = (*self.train_values, *self.valid_values, *self.test_values)
        are_trimmed = all(text and text.strip(" \t") == text for text in texts)
        check(
            self,
            self._where,
            ("train_values", self.train_values and self.test_values, f"give {_VALUES}"),
            ("valid_values", one_valid, f"give {_VALUES}"),
            ("train_values", len(set(texts)) == len(texts), "give each text to one split, once"),
            ("train_values", are_trimmed, _TEXTS),
        )

    @property
    def split_of_value(self) -> dict[str, int]:
        """By values: the index in ``SPLITS`` of the split of each text of the column."""
        indices = {}
        for index, texts in enumerate((self.train_values, self.valid_values, self.test_values)):
            for text in texts:
                indices[text] = index
        return indices


def spec_key(name: str) -> str:
    """Return the key in ``[split]`` of a field of :class:`Split`."""
    return name.removesuffix("_files").removesuffix("_values")


_TIMES = 'valid_from = "2014-10-29" and test_from = "2014-10-30"'
_SHARES = "shares whose sum is less than 1, such as valid = 0.1, test = 0.1"
_FILES = (
    'train = "train*.csv", test = "test.csv", and valid = "valid.csv" or a share of the training '
    "rows, valid = 0.1"
)
_VALUES = (
    'train = "train", test = "test", and valid = "valid" or a share of the training rows, '
    "valid = 0.1"
)
_TEXTS = "give texts without spaces around them, and no empty text: rows without one have no split"
#: The fields that each kind of split takes.
SPLIT_BY: dict[str, tuple[str, ...]] = {
    "days": (),
    "share": ("valid", "test", "seed"),
    "column": ("column", "valid", "test", "seed"),
    "time": ("column", "time_format", "valid_from", "test_from", "valid", "test"),
    "files": ("train_files", "valid_files", "test_files", "valid", "seed"),
    "values": ("column", "train_values", "valid_values", "test_values", "valid", "seed"),
}

#: Halves the last day, as TorchRec's and NVIDIA's scripts do.
BY_DAYS = Split()
#: Accepts files of any names; used to list the files of a directory.
ANY_FILES = Split("share", 0.1, 0.1)
