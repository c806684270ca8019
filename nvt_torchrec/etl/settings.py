"""The settings of the ETL's commands ``run`` and ``extend``."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

from nvt_torchrec.base.command_line import Parsed, Settings, flag
from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.base.threads import count_cores
from nvt_torchrec.formats.day_names import parse_days
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.toml_file import load_spec

ENGINES = ("auto", "cpu", "dask")
#: Engines of a run; NVTabular's own operators cannot extend what they fitted.
RUN_ENGINES = (*ENGINES, "nvtabular")
ON_BAD_ROWS = ("error", "quarantine")
#: Offsets within a block are 32-bit integers, and its last line may add up to 1 GiB.
MAX_BLOCK_MB = 1023
#: Heading in --help for the flags that a run and an extension share.
_READING = "how days are read"


#: Declares the flag for the number of threads of a command.
threads_flag = functools.partial(
    flag, "number of threads (default: one per core)", count_cores, minimum=1
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadSettings(Settings):
    """The settings that a run and an extension share: how days are read, and where.

    Raises:
        SettingsError: A value is not allowed, or settings contradict each other.
    """

    # fmt: off
    workers: int | None = flag(
        "number of threads or processes (default: one per core; with GPUs, one per GPU)", None,
        minimum=1, excludes=("scheduler",), group=_READING
    )
    scheduler: str | None = flag(
        "address of a running Dask cluster to use instead of starting one", None,
        metavar="ADDRESS", group=_READING
    )
    table: tuple[str, ...] = flag(
        "paths of the spec's tables and event sources that are not in the log's directory", (),
        metavar="NAME=PATH,…", group=_READING
    )
    label_path: tuple[str, ...] = flag(
        "paths of the spec's label files that are not in the log's directory", (),
        metavar="NAME=PATH,…", group=_READING
    )
    on_bad_rows: str = flag(
        "stop at the first malformed row, or leave such rows out and keep them in OUT/rejected",
        "error", choices=ON_BAD_ROWS, group=_READING
    )
    max_bad_fraction: float = flag(
        "with --on_bad_rows quarantine, stop if more than this share of the rows read is malformed",
        0.01, minimum=0, maximum=1, group=_READING
    )
    strict_gpu: bool = flag(
        "stop with an error if a GPU counts or encodes the first block differently from the CPU; "
        "by default, warn and continue on the CPU", False, group=_READING
    )
    # fmt: on

    @property
    def threads(self) -> int:
        """The number of threads of this process."""
        return self.workers or count_cores()

    @property
    def reject(self) -> bool:
        """Whether bad rows are left out."""
        return self.on_bad_rows == "quarantine"


def _check_output_and_engine(settings: EtlSettings | ExtendSettings) -> None:
    """Make the output path absolute; raise SettingsError if the engine cannot use a scheduler."""
    # A Dask worker on another machine may have another working directory.
    object.__setattr__(settings, "output_path", settings.output_path.absolute())
    if settings.engine == "cpu" and settings.scheduler:
        raise SettingsError(
            f"--engine cpu and --scheduler {settings.scheduler} are both set",
            "the cpu engine runs on this machine; use --engine dask for a Dask cluster",
        )


@dataclasses.dataclass(frozen=True)
class EtlSettings(ReadSettings):
    """The settings of a run. Each field is a flag of ``python -m etl run``.

    Raises:
        SettingsError: A value is not allowed, or settings contradict each other.
    """

    # fmt: off
    input_path: str = flag(
        "directory of day_0, day_1 … or of other numbered or dated files; or a glob, or one file; "
        "local or URL", metavar="RAW"
    )
    output_path: Parsed[Path] = flag("local directory to write, new or empty", metavar="OUT")
    spec: Parsed[FeatureSpec] = flag(
        "feature spec: a file, or the name of a built-in one (default: Criteo's log)", load_spec,
        parse=load_spec, metavar="TOML"
    )
    days: Parsed[frozenset[int] | None] = flag(
        "use only these days, for example 0-3,7 or 2024-10-28..2024-10-31 "
        "(default: all, without gaps)", None, parse=parse_days, metavar="LIST"
    )
    limit_rows: int | None = flag("use only the first N rows of each day", None, minimum=1)
    block_mb: int = flag("MiB of text per unit of work", 64, minimum=1, maximum=MAX_BLOCK_MB)
    engine: str = flag(
        "cpu: threads of this machine; dask: workers of a cluster, on their GPUs if they have any, "
        "with the same result; nvtabular: NVTabular's own operators on such workers, whose output "
        "cannot be extended; auto: dask with a --scheduler or if GPUs are faster, else cpu",
        "auto", choices=RUN_ENGINES
    )
    resume: bool = flag(
        "not needed: a run continues an interrupted one in OUT", False, excludes=("restart",)
    )
    restart: bool = flag("discard an interrupted run in OUT and start again", False)
    # fmt: on

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_output_and_engine(self)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready form of the settings that can change the result."""
        return {
            "spec": self.spec.to_dict(),
            "days": None if self.days is None else sorted(self.days),
            "limit_rows": self.limit_rows,
            "block_mb": self.block_mb,
            "engine": self.engine,
            "on_bad_rows": self.on_bad_rows,
        }


@dataclasses.dataclass(frozen=True)
class ExtendSettings(ReadSettings):
    """The settings of an extension. Each field is a flag of ``python -m etl extend``.

    Raises:
        SettingsError: A value is not allowed, or settings contradict each other.
    """

    # fmt: off
    output_path: Path = flag("the OUT of a finished `python -m etl run`", metavar="OUT")
    input_path: str = flag(
        "the new day: a file such as day_24, named by its number or date; or a directory, of which "
        "all days newer than those in OUT are added; local or URL", "", metavar="RAW"
    )
    undo: bool = flag(
        "go back to the previous generation, which is kept in OUT/.previous", False,
        excludes=("input_path", "resume")
    )
    days: frozenset[int] | None = flag(
        "add only these days, for example 24-26; unlisted days may be missing", None,
        parse=parse_days, metavar="LIST"
    )
    allow_repeated_day: bool = flag(
        "add a day even if its file is a copy of an earlier day's file", False
    )
    max_rows_factor: float = flag(
        "refuse a day with more than X times the rows of the largest earlier day, or with fewer "
        "than 1/X of the rows of the smallest", 5.0, minimum=1, maximum=float("inf")
    )
    keep_days: int | None = flag(
        "keep the parquet of only the newest N days; ids do not change (default: keep all)", None,
        minimum=2, metavar="N"
    )
    block_mb: int | None = flag(
        "MiB of text per unit of work (default: as in the run)", None, minimum=1,
        maximum=MAX_BLOCK_MB
    )
    engine: str = flag(
        "as in `python -m etl run`: cpu, dask, or auto", "auto", choices=ENGINES
    )
    resume: bool = flag(
        "without --input_path: finish putting a new generation in place after an interruption; "
        "with it, not needed: the same command continues", False, excludes=("restart",)
    )
    restart: bool = flag("discard the day that an interrupted extension was adding", False)
    json: bool = flag("print generation, days and rows as JSON, for programs", False)
    # fmt: on

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_output_and_engine(self)
        if not (self.input_path or self.undo or self.resume):
            raise SettingsError("--input_path is missing", "pass the new day, or its directory")

    def day_settings(self, spec: FeatureSpec, block_mb: int, limit_rows: int | None) -> EtlSettings:
        """Return the settings for reading a day: these, completed by those of the original run."""
        shared = {}
        for field in dataclasses.fields(EtlSettings):
            # These mean something else for an extension, or have their own defaults in a run.
            differs = field.name in ("days", "block_mb", "resume", "restart")
            if hasattr(self, field.name) and not differs:
                shared[field.name] = getattr(self, field.name)
        block_mb = self.block_mb or block_mb
        return EtlSettings(spec=spec, limit_rows=limit_rows, block_mb=block_mb, **shared)
