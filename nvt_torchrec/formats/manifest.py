"""The manifest of a run: its inputs, settings, row counts and files. It is written last.

The same run writes the same bytes, so timings are in another file. :mod:`etl.finish.make_manifest`
makes it.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from nvt_torchrec.base.files.artifact import FileEntry, Format
from nvt_torchrec.formats.day_names import format_day_title

FORMAT = Format("", 4, "the ETL's manifest", digest_key="blake2b")
_AGAIN = "copy the manifest again, or run the ETL again"
_OTHER_VERSION = "read it with the version of this program that wrote it, or run the ETL again"


class _ByKey:
    """Gives access to attributes by their JSON keys, too: ``manifest["rows"]["in"]``."""

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)


@dataclasses.dataclass(frozen=True)
class InputFile(_ByKey):
    """A raw file that was read.

    Attributes:
        day: The number of its day.
        path: Its path or URL.
        fingerprint: Its size, and its time of change or a checksum.
        rows: The numbers of rows ``in``, ``out`` and ``rejected``; with labels from other files
            also of rows ``waiting`` for a later day.
        digest: Equal for copies of a file, see :func:`etl.state.run_record.content_digest`.
    """

    day: int
    path: str
    fingerprint: dict[str, Any]
    rows: dict[str, int]
    digest: str


@dataclasses.dataclass(frozen=True)
class PartFile(_ByKey):
    """A parquet file of a split.

    Attributes:
        file: Its path, relative to the directory of the splits.
        rows: The number of rows.
        bytes: The size of the file.
        day: The number of the day that its rows come from.
        generation: The generation of the workflow that encoded it.
        footer: The SHA-256 of its footer.
    """

    file: str
    rows: int
    bytes: int
    day: int
    generation: int
    footer: str

    @property
    def split(self) -> str:
        """The split that it belongs to."""
        return self.file.split("/")[0]


@dataclasses.dataclass(frozen=True)
class Extension(_ByKey):
    """A day that ``python -m etl extend`` added, with its settings."""

    generation: int
    day: int
    settings: dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest(_ByKey):
    """The contents of ``manifest.json``.

    Attributes:
        generation: The generation of the workflow.
        settings: The settings of the run.
        extensions: The days that were added to the output.
        inputs: The raw files.
        rows: The numbers of rows ``in``, ``out`` and ``rejected``.
        days: The days of each split.
        splits: For each split, the numbers of rows and positives and, by column, of missing values
            and of ids out of vocabulary.
        by_day_and_split: The same numbers for each day.
        by_day: The numbers of rows and positives of each day.
        num_embeddings_per_feature: The table sizes, as the trainer's flag takes them.
        workflow_digest: The digest of the workflow.
        versions: The versions of the packages.
        files: The parts.
        next_parts: The number of the next part of each split.
        described: The digests of the files, by path below OUT, that describe the parts, the
            workflow and the state of the extension, and of the stores of histories and vectors.
        split: The rule by which rows were split, with its cuts; None for a split by days.
    """

    generation: int
    settings: dict[str, Any]
    extensions: list[Extension] = dataclasses.field(default_factory=list)
    inputs: list[InputFile]
    rows: dict[str, int]
    days: dict[str, list[int]]
    splits: dict[str, dict[str, Any]]
    by_day_and_split: dict[str, dict[str, dict[str, Any]]]
    by_day: dict[str, dict[str, int]]
    num_embeddings_per_feature: str
    workflow_digest: str
    versions: dict[str, Any]
    files: list[PartFile]
    next_parts: dict[str, int]
    described: dict[str, FileEntry] = dataclasses.field(default_factory=dict)
    split: dict[str, Any] | None = None

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Read a manifest.

        Raises:
            BadInputError: The file is missing or damaged.
            SchemaError: An incompatible version of this program wrote it.
        """
        return FORMAT.read(cls, path, _AGAIN, other_version=_OTHER_VERSION)

    def write(self, path: Path) -> None:
        """Write the manifest atomically. Raises :class:`OutputError`."""
        content = dataclasses.asdict(self)
        content["described"] = {name: file.to_dict() for name, file in self.described.items()}
        if self.split is None:
            del content["split"]
        FORMAT.write(path, content)

    @property
    def log_name(self) -> str:
        """The raw files, for the title of a page."""
        paths = [file.path for file in self.inputs]
        if len(paths) > 1:
            return f"{len(paths)} files, {paths[0]} to {paths[-1]}"
        return "".join(paths)

    @property
    def day_titles(self) -> dict[int, str]:
        """The name of each day for users: a date, the name of a file, or a number."""
        return {file.day: format_day_title(file.path) or str(file.day) for file in self.inputs}

    @property
    def split_text(self) -> str:
        """The rule by which rows were split, for a page."""
        rule = self.split
        if rule is None:
            rule = {"by": "days"} | {
                split: self._name_days(days) for split, days in self.days.items()
            }
        texts = []
        for key, value in rule.items():
            listed = ", ".join(value) if isinstance(value, list | tuple) else value
            texts.append(f"{key.replace('_', ' ')} {listed}")
        return f"{texts[0]}: {', '.join(texts[1:])}"

    def _name_days(self, days: list[int]) -> str:
        """Return the names of the first and last day of a split, for a page."""
        if not days:
            return "none"
        titles = self.day_titles
        first = titles.get(days[0], str(days[0]))
        last = titles.get(days[-1], str(days[-1]))
        return first if first == last else f"{first} to {last}"

    def fingerprints(self) -> dict[str, Any]:
        """Return the fingerprints of the inputs by path, as in a plan record."""
        return {file.path: file.fingerprint for file in self.inputs}

    def drop_extensions(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the inputs of a plan record without those of days that were added later."""
        extended = {extension.day for extension in self.extensions}
        added = {file.path: file.fingerprint for file in self.inputs if file.day in extended}
        return {path: value for path, value in inputs.items() if added.get(path) != value}
