"""Prepare labels, tables, events and negatives, before the rows of the log are counted."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from nvt_torchrec.base.progress_bars import show_progress
from nvt_torchrec.clicklog.readers.days import DayFile
from nvt_torchrec.etl.settings import EtlSettings
from nvt_torchrec.etl.stage_timer import StageTimer
from nvt_torchrec.etl.state import output
from nvt_torchrec.etl.tables.table_sources import TableSources
from nvt_torchrec.etl.units.unit_plan import ReadyRows, UnitPlan, cut_files
from nvt_torchrec.formats.etl_output import EtlOutput
from nvt_torchrec.formats.rows import UNLIMITED

if TYPE_CHECKING:
    from nvt_torchrec.etl.labels.label_state import EarlierLabels


def make_rows_bar(what: str, plan: UnitPlan, split: str | None = None, initial: int = 0) -> tqdm:
    """Make a progress bar of rows, which is only shown on a terminal."""
    return show_progress(what, plan.estimated_rows(split), initial=initial)


@dataclasses.dataclass(frozen=True)
class FilesBeside:
    """Stores the tables, events, labels and negatives of a log in the state of a run.

    Parts that an earlier process has stored are not read again.

    Attributes:
        settings: The settings of the run.
        work: The directory of the state.
        before: For an extension, the output that is extended.
        tables: The files of tables and of sources of events.
        labels: The files of labels.
        timer: Times the stages.
    """

    settings: EtlSettings
    work: Path
    before: EtlOutput | None
    tables: TableSources
    labels: TableSources
    timer: StageTimer

    def prepare_labels(
        self, files: list[DayFile], earlier: EarlierLabels | None
    ) -> dict[str, ReadyRows] | None:
        """Find the clicked rows of the log, and the rows that are written now.

        Args:
            files: The files of the log.
            earlier: For an extension, the labels of the earlier days.

        Returns:
            With a split by days, the rows of each file that are written now; else None.
        """
        from nvt_torchrec.etl.labels.prepare_labels import count_lines, list_ready, prepare_labels

        settings = self.settings
        directory = self.work / output.LABELS
        blocks = cut_files(
            files,
            settings.spec,
            block_bytes=settings.block_mb << 20,
            limit_rows=settings.limit_rows,
        )
        with self.timer("labels"), show_progress("labels") as bar:
            prepare_labels(
                list(itertools.chain.from_iterable(blocks.values())),
                settings.spec,
                self.labels,
                self.work,
                earlier=earlier,
                threads=settings.threads,
                max_bad_rows=UNLIMITED if settings.reject else 0,
                report=bar.update,
            )
        if settings.spec.split.by != "days":
            return None
        ready = {}
        for source, blocks_of_file in blocks.items():
            lines = count_lines(directory, blocks_of_file)
            ready[source] = ReadyRows(lines, list_ready(directory, blocks_of_file))
        return ready

    def store_tables(self, plan: UnitPlan) -> None:
        """Store the tables that columns are joined from, and check that the log has their keys."""
        from nvt_torchrec.etl.tables.prepare_tables import check_keys, store_tables

        settings = self.settings
        with self.timer("tables"), show_progress("tables") as bar:
            store_tables(
                settings.spec,
                self.tables,
                self.work,
                before=self.before.workflow if self.before else None,
                threads=settings.threads,
                reject=settings.reject,
                report=bar.update,
            )
        blocks = plan.train_blocks or plan.blocks
        check_keys(settings.spec, self.work, list(dict.fromkeys([blocks[0], blocks[-1]])))

    def store_sources(self, newest: int | None) -> None:
        """Read the sources of events.

        Args:
            newest: For an extension, the time of the newest row of the earlier days.
        """
        from nvt_torchrec.etl.events.source_events import store_sources

        settings = self.settings
        with self.timer("sources"), show_progress("sources") as bar:
            store_sources(
                settings.spec,
                self.tables,
                self.work,
                newest=newest,
                threads=settings.threads,
                reject=settings.reject,
                report=bar.update,
            )

    def prepare_negatives(self, plan: UnitPlan, max_bad_rows: int) -> None:
        """Read the items from which negatives are drawn, and the items of each user.

        Args:
            plan: The blocks.
            max_bad_rows: The maximum number of malformed rows of a block that are left out; 0: a
                malformed row is an error.
        """
        from nvt_torchrec.etl.negatives.prepare_negatives import prepare_negatives

        settings = self.settings
        with self.timer("negatives"), make_rows_bar("negatives", plan) as bar:
            prepare_negatives(
                plan,
                settings.spec,
                self.work,
                self.tables,
                earlier=self.before.extension if self.before else None,
                threads=settings.threads,
                max_bad_rows=max_bad_rows,
                report=bar.update,
            )
