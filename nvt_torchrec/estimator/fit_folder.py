"""The folder of a fit: the outputs of the commands, by the names that the documentation uses."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

from nvt_torchrec.base.errors import OutputError
from nvt_torchrec.base.files.atomic import output_errors
from nvt_torchrec.formats.etl_output import PREVIOUS, EtlOutput
from nvt_torchrec.training.reporting.page import REPORT_FILE


@dataclasses.dataclass(frozen=True)
class FitFolder:
    """The paths of a fit.

    Attributes:
        root: The folder.
    """

    root: Path

    @property
    def log(self) -> Path:
        """The rows that were fitted, as parquet: what ``nvt-etl run`` reads."""
        return self.root / "log.parquet"

    @property
    def spec(self) -> Path:
        """The guessed spec, with the reasons as comments; absent if a spec was given."""
        return self.root / "spec.toml"

    @property
    def output(self) -> EtlOutput:
        """What ``nvt-etl run`` writes."""
        return EtlOutput(self.root / "OUT")

    @property
    def checkpoint(self) -> Path:
        """What ``nvt-train`` writes."""
        return self.root / "CKPT"

    @property
    def training_log(self) -> Path:
        """The log of ``nvt-train``."""
        return self.root / "LOG"

    @property
    def training_page(self) -> Path:
        """The page of ``nvt-train``."""
        return self.training_log / REPORT_FILE

    @property
    def bundle(self) -> Path:
        """What ``nvt-infer bundle`` writes."""
        return self.root / "BUNDLE"

    def clear(self) -> None:
        """Make the folder, or delete what an earlier fit left in it.

        Raises:
            OutputError: It holds something else, or cannot be written.
        """
        own = [self.log, self.spec, self.output.root, self.checkpoint]
        own += [self.training_log, self.bundle]
        with output_errors(self.root, "choose a writable folder"):
            self.root.mkdir(parents=True, exist_ok=True)
            # Nothing is deleted that took work of its own, such as a day that was added, or a
            # checkpoint that continues this one.
            others = sorted(path.name for path in self.root.iterdir() if path not in own)
            if others or (self.output.root / PREVIOUS).exists():
                found = ", ".join(others[:5]) or f"days added to {self.output.root}"
                raise OutputError(
                    f"{self.root}: holds what no fit has written: {found}",
                    "choose another folder, or remove it first",
                )
            for path in own:
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
