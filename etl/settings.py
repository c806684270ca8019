"""What a run of the ETL is asked for."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from clicklog.errors import SettingsError
from clicklog.spec.feature_spec import FeatureSpec

ENGINES = ("auto", "cpu", "dask")
ON_BAD_ROWS = ("error", "quarantine")
SHUFFLES = ("none", "file", "full")


@dataclasses.dataclass(frozen=True)
class EtlSettings:
    """What a run is asked for.

    Attributes:
        input_path: directory of the days, local or remote.
        output_path: local directory, absent or empty.
        spec: the columns, vocabulary policies and dense transform.
        days: which days to use; None: all there are, without a gap.
        limit_rows: use the first so many lines of each day only.
        block_mb: MiB of text per unit of work.
        engine: ``cpu``, ``dask``, or ``auto``: dask where there is a GPU or a scheduler.
        workers: threads of the cpu engine, processes of dask; None: one per GPU, or per core.
        scheduler: address of a running Dask cluster to use instead of starting one.
        on_bad_rows: ``error``: stop at the first; ``quarantine``: keep them in ``rejected/``.
        max_bad_fraction: of all rows, that may be put there.
        shuffle: the order of the training rows: as in the log, or by ``seed``, within each day
            (``file``) or over the ``full`` split.
        seed: of the shuffle.
        max_decompressed_gb: of text that a compressed day may become; None: by its first bytes.
        resume: finish what an interrupted run began.
        restart: discard what an interrupted run did.
    """

    input_path: str
    output_path: Path
    spec: FeatureSpec
    days: frozenset[int] | None = None
    limit_rows: int | None = None
    block_mb: int = 64
    engine: str = "auto"
    workers: int | None = None
    scheduler: str | None = None
    on_bad_rows: str = "error"
    max_bad_fraction: float = 0.01
    shuffle: str = "none"
    seed: int = 0
    max_decompressed_gb: float | None = None
    resume: bool = False
    restart: bool = False

    def __post_init__(self) -> None:
        # workers of another cluster may run elsewhere
        object.__setattr__(self, "output_path", self.output_path.absolute())
        for name, least in (("limit_rows", 1), ("block_mb", 1), ("workers", 1), ("seed", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise SettingsError(f"--{name} {value}: at least {least}")
        for name, allowed in (
            ("engine", ENGINES), ("on_bad_rows", ON_BAD_ROWS), ("shuffle", SHUFFLES)
        ):  # fmt: skip
            if getattr(self, name) not in allowed:
                raise SettingsError(
                    f"--{name} {getattr(self, name)}", f"one of {', '.join(allowed)}"
                )
        if not 0 <= self.max_bad_fraction <= 1:
            raise SettingsError(f"--max_bad_fraction {self.max_bad_fraction}: from 0 to 1")
        if self.max_decompressed_gb is not None and not self.max_decompressed_gb > 0:
            raise SettingsError(f"--max_decompressed_gb {self.max_decompressed_gb}: more than 0")
        if self.workers and self.scheduler:
            raise SettingsError("--workers and --scheduler are both set", "a cluster has its own")
        if self.resume and self.restart:
            raise SettingsError("--resume and --restart are both set", "choose one")
        if self.engine == "cpu" and self.scheduler:
            raise SettingsError(
                f"--engine cpu and --scheduler {self.scheduler} are both set",
                "the cpu engine runs on this machine; use --engine dask for a Dask cluster",
            )

    @property
    def reject(self) -> bool:
        """Whether bad rows are left out."""
        return self.on_bad_rows == "quarantine"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form, without what cannot change the result."""
        return {
            "spec": self.spec.to_dict(),
            "days": None if self.days is None else sorted(self.days),
            "limit_rows": self.limit_rows,
            "block_mb": self.block_mb,
            "engine": self.engine,
            "on_bad_rows": self.on_bad_rows,
            "shuffle": self.shuffle,
            "seed": self.seed,
        }
