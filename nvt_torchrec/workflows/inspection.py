"""Reports on saved workflows, for ``python -m workflows``."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from nvt_torchrec.base.command_line import Settings, flag
from nvt_torchrec.base.files.mapping import map_array
from nvt_torchrec.formats.day_names import format_days
from nvt_torchrec.formats.feature_spec import CategoricalColumn
from nvt_torchrec.formats.table_files import DIRECTORY, KEYS
from nvt_torchrec.formats.vectors import IN_WORKFLOW, VectorStore
from nvt_torchrec.formats.workflow_description import FORMAT, WorkflowDescription
from nvt_torchrec.workflows.description import inspect


def report(path: Path | str) -> str:
    """Return vocabularies, out-of-vocabulary policy, statistics, descent and sizes as text.

    Raises:
        BadInputError, SchemaError: See :func:`workflows.description.inspect`.
    """
    path = Path(path)
    description = inspect(path)
    sections = [
        _head(path, description),
        "categorical columns\n" + table(_categorical(description)),
    ]
    if description.spec.dense:
        sections.append("dense columns\n" + table(_dense(description)))
    if description.spec.joined_tables:
        sections.append("tables of the log's keys\n" + table(_joined(description)))
    if description.spec.vectors:
        sections.append("vectors of these tables\n" + table(_vectors(description)))
    if description.spec.label_files:
        sections.append("labels from other files\n" + table(_label_files(description)))
    if description.spec.event_sources:
        sections.append("sources of events\n" + table(_sources(description)))
    sections.append("line of descent\n" + generations_table(description))
    sizes = description.table_schema.num_embeddings_per_feature
    sections.append(f"table sizes to train with\n  --num_embeddings_per_feature {sizes}")
    return "\n\n".join(sections)


def _head(path: Path, description: WorkflowDescription) -> str:
    size = sum(entry.bytes for entry in description.copied_files.values())
    compiled = sum(f.stat().st_size for f in (path / "compiled").rglob("*") if f.is_file())
    versions = {name: version.split()[0] for name, version in description.versions.items()}
    written_by = ", ".join(f"{name} {version}" for name, version in versions.items())
    return (
        f"workflow    {path} (format {FORMAT.version})\n"
        f"digest      {description.digest}\n"
        f"written by  {written_by}\n"
        f"on disk     {size / 2**20:.1f} MiB, and {compiled / 2**20:.1f} MiB compiled"
    )


def generations_table(description: WorkflowDescription) -> str:
    """Return a line for each generation, with what it added to the one before."""
    rows = [["generation", "digest", "days", "values", "added"]]
    before = 0
    for generation in description.lineage:
        values = sum(generation.values.values())
        row = [generation.number, generation.digest[:12], format_days(generation.days), values]
        rows.append([*map(str, row), str(values - before)])
        before = values
    return table(rows)


def _categorical(description: WorkflowDescription) -> list[list[str]]:
    head = "column,raw,vocabulary,values,table size,kept,out of vocabulary,null seen,oov seen"
    rows = [head.split(",")]
    for column in description.spec.categorical:
        vocabulary = description.vocabularies[column.name]
        name = vocabulary.name
        nulls, oov = str(vocabulary.observed["null"]), str(vocabulary.observed["oov"])
        if column.hash_buckets:  # has no vocabulary, and is not counted
            name = nulls = oov = "-"
        rows.append(
            [
                column.name,
                f"list of {column.raw}" if column.multi_hot else column.raw,
                name,
                str(vocabulary.values),
                str(vocabulary.table_size),
                _kept(column),
                _oov_ids(column),
                nulls,
                oov,
            ]
        )
    return rows


def _joined(description: WorkflowDescription) -> list[list[str]]:
    """Return a line for each table that columns are joined from."""
    rows = [["table", "key", "rows", "a key has", "columns"]]
    for rule in description.spec.joined_tables:
        keys = map_array(description.path / DIRECTORY / rule.name / KEYS)
        names = [column.name for column in description.spec.table_columns(rule.name)]
        names += [vector.name for vector in description.spec.table_vectors(rule.name)]
        versions = f"versions by {rule.valid_from}" if rule.valid_from else "one row"
        rows.append([rule.name, ", ".join(rule.key), str(len(keys)), versions, ", ".join(names)])
    return rows


def _vectors(description: WorkflowDescription) -> list[list[str]]:
    """Return a line for each vector."""
    rows = [["vector", "table", "width", "stored as", "vectors"]]
    for vector in description.spec.vectors:
        count = "left out"  # of the bundle of a model that takes none
        if (description.path / IN_WORKFLOW).is_dir():
            count = str(VectorStore(description.path / IN_WORKFLOW, vector.stored).count)
        rows.append([vector.name, vector.table, str(vector.width), vector.dtype, count])
    return rows


def _label_files(description: WorkflowDescription) -> list[list[str]]:
    """Return a line for each label that is from other files than the log."""
    rows = [["label", "files", "key", "within"]]
    for file in description.spec.label_files:
        rows.append([file.name, file.path, ", ".join(file.key), file.within])
    return rows


def _sources(description: WorkflowDescription) -> list[list[str]]:
    """Return a line for each source whose events are summed up."""
    rows = [["source", "time", "known after", "columns"]]
    for rule in description.spec.event_sources:
        names = []
        for column in description.spec.aggregates:
            if column.aggregate and column.aggregate.source == rule.name:
                names.append(column.name)
        rows.append([rule.name, rule.time, rule.known or "-", ", ".join(names)])
    return rows


def _kept(column: CategoricalColumn) -> str:
    if column.hash_buckets:
        return "none: all hashed"
    if column.freq_threshold:
        return f"seen >= {column.freq_threshold} times"
    if column.max_table_size:
        return f"table <= {column.max_table_size}"
    return "all seen"


def _oov_ids(column: CategoricalColumn) -> str:
    last = column.reserved_ids - 1
    return "id 2" if last == 2 else f"ids 2 to {last}, by hash"


def _dense(description: WorkflowDescription) -> list[list[str]]:
    rows = [["column", "raw", "missing as", "transform", "mean", "std"]]
    for column in description.spec.dense:
        statistics = description.statistics.get(column.name)
        mean = std = "-"
        if statistics:
            mean, std = f"{statistics['mean']:.6g}", f"{statistics['std']:.6g}"
        formula = description.spec.get_transform(column).formula
        rows.append([column.name, column.raw, str(column.fill), formula, mean, std])
    return rows


def table(rows: list[list[str]]) -> str:
    """Format a table and its head; columns of numbers are aligned to the right."""
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    right = [all(map(_is_number, column[1:])) for column in columns]
    lines = []
    for row in rows:
        cells = []
        for cell, width, flush_right in zip(row, widths, right, strict=True):
            cells.append(cell.rjust(width) if flush_right else cell.ljust(width))
        lines.append(("  " + "  ".join(cells)).rstrip())
    return "\n".join(lines)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return cell == "-"
    return True


@dataclasses.dataclass(frozen=True)
class InspectSettings(Settings):
    """The workflow to inspect."""

    workflow: Path = flag("directory of the workflow", metavar="OUT/workflow", positional=True)


SETTINGS = (InspectSettings,)


def run(settings: InspectSettings) -> None:
    """Print vocabularies, statistics and sizes of a workflow whose files are those written."""
    description = inspect(settings.workflow)
    description.verify()
    if description.spec.events:
        # here, as it imports Numba, a second of CPU time that other workflows need not take
        from nvt_torchrec.workflows.event_state import EventState

        EventState.load(description, verify=True)
    print(report(settings.workflow))
