"""Which rows are for training, validation and test."""

from __future__ import annotations

import dataclasses

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.formats.spec.times import check_time_format, parse_iso

SPLIT_BY = ("days", "share", "column", "time", "files")


@dataclasses.dataclass(frozen=True)
class Split:
    """The rule by which rows are divided into train, valid and test.

    Attributes:
        by: ``days``: the last day is halved into valid and test, all earlier ones are train.
            ``share``: a seeded hash of a row's place, its file and row number, decides.
            ``column``: a seeded hash of a column's value, so that for example a user's rows are all
            on one side. ``time``: rows before a time are train, those after another one test.
            ``files``: as the input files are named.
        valid: by share, column or time, the share of the rows (by time, the share just before
            test's) for validation; by files, the share of the training files' rows.
        test: likewise for test; not by files.
        seed: of the hash.
        column: by column or time, the name of a column of the file; it need not be a feature.
        time_format: by time, see :mod:`formats.spec.times`.
        valid_from: by time, instead of shares: when validation begins, as ISO 8601.
        test_from: by time: when test begins.
        train_files: by files, names or globs below the input directory.
        valid_files: likewise; () with ``valid`` as a share.
        test_files: likewise.
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

    def __post_init__(self) -> None:
        if self.by not in SPLIT_BY:
            raise SettingsError(f"split by {self.by!r}", f"one of {', '.join(SPLIT_BY)}")
        taken = ("by", *_FIELDS[self.by])
        for own in dataclasses.fields(self):
            if own.name in taken or getattr(self, own.name) == own.default:
                continue
            raise SettingsError(
                f"split by {self.by} with {own.name.removesuffix('_files')} = "
                f"{getattr(self, own.name)!r}",
                f"it takes {', '.join(taken[1:]) or 'nothing else'}",
            )
        for field, share in (("valid", self.valid), ("test", self.test)):
            if type(share) not in (int, float) or not 0 <= share < 1:
                raise SettingsError(f"split: {field} = {share!r}", "give a share from 0 to below 1")
        for field, text in (("column", self.column), ("time_format", self.time_format)):
            if not isinstance(text, str):
                raise SettingsError(f"split: {field} = {text!r}", "write it in quotes")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool) or self.seed < 0:
            raise SettingsError(f"split: seed = {self.seed!r}", "give an integer from 0 on")
        if self.by in ("share", "column"):
            self._check_shares()
        if self.by == "column" and not self.column:
            raise SettingsError("split by column without column", 'add column = "user"')
        if self.by == "time":
            self._check_times()
        if self.by == "files":
            self._check_files()

    def _check_shares(self) -> None:
        if not (self.valid and self.test and self.valid + self.test < 1):
            raise SettingsError(
                f"split by {self.by}: valid = {self.valid}, test = {self.test}",
                "give both, less than 1 together, such as valid = 0.1, test = 0.1",
            )

    def _check_times(self) -> None:
        if not self.column:
            raise SettingsError("split by time without column", 'add column = "timestamp"')
        check_time_format(self.time_format, "split")
        if bool(self.valid_from) != bool(self.test_from) or bool(self.valid_from) == bool(
            self.valid
        ):
            raise SettingsError(
                "split by time needs two times or two shares",
                'add valid_from = "2014-10-29", test_from = "2014-10-30"; or valid = 0.1, '
                "test = 0.1",
            )
        if not self.valid_from:
            self._check_shares()
        elif parse_iso(self.valid_from, "valid_from") >= parse_iso(self.test_from, "test_from"):
            raise SettingsError(
                f"split: valid_from = {self.valid_from!r} is not before test_from = "
                f"{self.test_from!r}",
                "exchange them",
            )

    def _check_files(self) -> None:
        if (
            not self.train_files
            or not self.test_files
            or bool(self.valid_files) == bool(self.valid)
        ):
            raise SettingsError(
                "split by files without the files of each split",
                'add train = "train*.csv", test = "test.csv", and valid = "valid.csv" or a share '
                "of the training rows, valid = 0.1",
            )


_FIELDS: dict[str, tuple[str, ...]] = {
    "days": (),
    "share": ("valid", "test", "seed"),
    "column": ("column", "valid", "test", "seed"),
    "time": ("column", "time_format", "valid_from", "test_from", "valid", "test"),
    "files": ("train_files", "valid_files", "test_files", "valid", "seed"),
}


#: The last day is halved, as TorchRec's and NVIDIA's scripts do.
BY_DAYS = Split()
