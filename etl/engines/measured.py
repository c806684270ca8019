"""Which engine is faster on this machine: measured once, remembered in the user's cache."""

from __future__ import annotations

import dataclasses
import datetime
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from nvt_torchrec.base.errors import BadInputError, ClickLogError
from nvt_torchrec.base.files.artifact import Format
from nvt_torchrec.base.files.atomic import read_json
from nvt_torchrec.etl.engines.hardware import cores, gpu_count
from nvt_torchrec.formats.etl_output import EtlOutput

log = logging.getLogger(__name__)

FORMAT = Format(
    "nvt-torchrec engines", 1, "what `python -m etl doctor --measure` measured of both engines"
)
ENGINES = ("cpu", "dask")
#: Rows of the file that each day of the log is, and of the first, short runs.
DAY_ROWS = 250_000
_SHORT_DAYS = 3
_AGAIN = "measure again: python -m etl doctor --measure"


@dataclasses.dataclass(frozen=True)
class Hardware:
    """What the speeds depend on: host, processor, cores and GPUs that this process may use."""

    host: str
    cpu: str
    cores: int
    gpus: int

    @classmethod
    def here(cls) -> Hardware:
        """Return that of this machine."""
        return cls(platform.node(), _cpu_name(), cores(), gpu_count())


@dataclasses.dataclass(frozen=True)
class Measurement:
    """The speeds of both engines on the same synthetic log.

    Attributes:
        hardware: Where they were measured.
        date: When, ISO 8601.
        rows: Rows of the log.
        rows_per_s: Engine → rows/s of fitting and transforming together.
    """

    hardware: Hardware
    date: str
    rows: int
    rows_per_s: dict[str, float]

    def __post_init__(self) -> None:
        if self.rows_per_s.keys() != set(ENGINES) or min(self.rows_per_s.values()) <= 0:
            raise ValueError(f"rows/s {self.rows_per_s}")

    @property
    def winner(self) -> str:
        """The faster engine."""
        return max(ENGINES, key=self.rows_per_s.__getitem__)

    def __str__(self) -> str:
        speeds = ", ".join(f"{name} {self.rows_per_s[name]:,.0f} rows/s" for name in ENGINES)
        return f"measured here on {self.date}: {speeds}"


def measurement_file() -> Path:
    """Return where the measurement of this user is kept."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "nvt-torchrec" / "engines.json"


def read_measurement() -> Measurement | None:
    """Return what was measured on this hardware; None if nothing was."""
    file = measurement_file()
    try:
        if not file.exists():
            return None
        found = FORMAT.read(Measurement, file, _AGAIN)
    except (OSError, ClickLogError) as error:
        log.warning("%s", error)
        return None
    return found if found.hardware == Hardware.here() else None


def measure(seconds: float) -> Measurement:
    """Run both engines on a synthetic log, and keep their speeds for ``--engine auto``.

    Args:
        seconds: How long the slower engine works, about. The log and the output of one run at a
            time are below ``$TMPDIR``.

    Raises:
        BadInputError: An engine fails.
        OutputError: The measurement cannot be kept.
    """
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        days = _SHORT_DAYS
        speeds = _speeds(root, days)
        longer = round(min(speeds.values()) * seconds / DAY_ROWS)
        if longer > 2 * days:  # starting up is no large share of it any more
            days = longer
            speeds = _speeds(root, days)
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    found = Measurement(Hardware.here(), date, days * DAY_ROWS, speeds)
    FORMAT.write(measurement_file(), dataclasses.asdict(found))
    return found


def _speeds(root: Path, days: int) -> dict[str, float]:
    _make_log(root / "raw", days)
    log.info("timing both engines on %s rows", f"{days * DAY_ROWS:,}")
    speeds = {}
    for engine in ENGINES:
        output = root / "out"
        command = [sys.executable, "-m", "etl", "run", "--engine", engine]
        command += ["--input_path", str(root / "raw"), "--output_path", str(output)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = done.stderr.strip().splitlines()[-5:]
            raise BadInputError(
                f"the {engine} engine fails on a synthetic log:\n  " + "\n  ".join(lines),
                "`python -m etl doctor` may say why",
            )
        timings = read_json(EtlOutput(output).timings, "the time that a run took")
        speeds[engine] = float(timings["rows_per_s"])
        shutil.rmtree(output)
        log.info("%s: %s rows/s", engine, f"{speeds[engine]:,.0f}")
    return speeds


def _make_log(raw: Path, days: int) -> None:
    """Make a log of which all days are the same file."""
    from nvt_torchrec.clicklog.synthetic.log import SyntheticSettings, synthesize

    if not raw.exists():
        synthesize(raw, SyntheticSettings(1, DAY_ROWS, cardinality_scale=0.05))
    for day in range(1, days):
        if not (raw / f"day_{day}").exists():
            os.link(raw / "day_0", raw / f"day_{day}")


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
