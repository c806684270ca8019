"""The folder of a fit, which contains the outputs of the commands under their documented names."""

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
        """The rows of the fit as a parquet file, which the ETL reads."""
        return self.root / "log.parquet"

    @property
    def spec(self) -> Path:
        """The guessed spec with comments that explain it; absent if the caller gave a spec."""
        return self.root / "spec.toml"

    @property
    def output(self) -> EtlOutput:
        """The output of the ETL (``nvt-etl run``)."""
        return EtlOutput(self.root / "OUT")

    @property
    def checkpoint(self) -> Path:
        """The checkpoint of the training (``nvt-train``)."""
        return self.root / "CKPT"

    @property
    def training_log(self) -> Path:
        """The logs of the training (``nvt-train``)."""
        return self.root / "LOG"

    @property
    def training_page(self) -> Path:
        """The report page of the training (``nvt-train``)."""
        return self.training_log / REPORT_FILE

    @property
    def bundle(self) -> Path:
        """The bundle (``nvt-infer bundle``)."""
        return self.root / "BUNDLE"

    def clear(self) -> None:
        """Make the folder, or delete the files of an earlier fit in it.

        Raises:
            OutputError: The folder contains other files or cannot be written.
        """
        own = [self.log, self.spec, self.output.root, self.checkpoint]
        own += [self.training_log, self.bundle]
        with output_errors(self.root, "choose a writable folder"):
            self.root.mkdir(parents=True, exist_ok=True)
            # Keep the results of other work, such as an added day, or a checkpoint that continues
            # this one.
            others = sorted(path.name for path in self.root.iterdir() if path not in own)
            if others or (self.output.root / PREVIOUS).exists():
                found = ", ".join(others[:5]) or f"days added to {self.output.root}"
                raise OutputError(
                    f"{self.root}: contains files that no fit has written: {found}",
                    "choose another folder, or remove this one first",
                )
            for path in own:
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
