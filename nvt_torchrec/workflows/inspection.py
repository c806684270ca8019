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
    """Return a text about vocabularies, out-of-vocabulary policy, statistics, lineage and sizes.

    Raises:
        BadInputError, SchemaError: See :func:`workflows.description.inspect`.
    """
    path = Path(path)
    description = inspect(path)
    sections = [
        _format_head(path, description),
        "categorical columns\n" + format_table(_list_categorical(description)),
    ]
    if description.spec.dense:
        sections.append("dense columns\n" + format_table(_list_dense(description)))
    if description.spec.joined_tables:
        sections.append("tables of the log's keys\n" + format_table(_list_tables(description)))
    if description.spec.vectors:
        sections.append("vectors of these tables\n" + format_table(_list_vectors(description)))
    if description.spec.label_files:
        sections.append("labels from other files\n" + format_table(_list_label_files(description)))
    if description.spec.event_sources:
        sections.append("sources of events\n" + format_table(_list_sources(description)))
    sections.append("lineage\n" + format_generations(description))
    sizes = description.table_schema.num_embeddings_per_feature
    sections.append(f"table sizes to train with\n  --num_embeddings_per_feature {sizes}")
    return "\n\n".join(sections)


def _format_head(path: Path, description: WorkflowDescription) -> str:
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


def format_generations(description: WorkflowDescription) -> str:
    """Return a table of the generations, with the number of values that each added."""
    rows = [["generation", "digest", "days", "values", "added"]]
    before = 0
    for generation in description.lineage:
        values = sum(generation.values.values())
        row = [generation.number, generation.digest[:12], format_days(generation.days), values]
        rows.append([*map(str, row), str(values - before)])
        before = values
    return format_table(rows)


def _list_categorical(description: WorkflowDescription) -> list[list[str]]:
    head = "column,raw,vocabulary,values,table size,kept,out of vocabulary,null seen,oov seen"
    rows = [head.split(",")]
    for column in description.spec.categorical:
        vocabulary = description.vocabularies[column.name]
        name = vocabulary.name
        nulls = str(vocabulary.observed["null"])
        oov = str(vocabulary.observed["oov"])
        if column.hash_buckets:  # it has no vocabulary, and its values are not counted
            name = "-"
            nulls = "-"
            oov = "-"
        rows.append(
            [
                column.name,
                f"list of {column.raw}" if column.multi_hot else column.raw,
                name,
                str(vocabulary.values),
                str(vocabulary.table_size),
                _describe_policy(column),
                _describe_oov_ids(column),
                nulls,
                oov,
            ]
        )
    return rows


def _list_tables(description: WorkflowDescription) -> list[list[str]]:
    """Return a line for each table that columns are joined from."""
    rows = [["table", "key", "rows", "a key has", "columns"]]
    for rule in description.spec.joined_tables:
        keys = map_array(description.path / DIRECTORY / rule.name / KEYS)
        names = [column.name for column in description.spec.table_columns(rule.name)]
        names += [vector.name for vector in description.spec.table_vectors(rule.name)]
        versions = f"versions by {rule.valid_from}" if rule.valid_from else "one row"
        rows.append([rule.name, ", ".join(rule.key), str(len(keys)), versions, ", ".join(names)])
    return rows


def _list_vectors(description: WorkflowDescription) -> list[list[str]]:
    """Return a line for each vector."""
    rows = [["vector", "table", "width", "stored as", "vectors"]]
    for vector in description.spec.vectors:
        count = "left out"  # a bundle of a model without vectors does not contain them
        if (description.path / IN_WORKFLOW).is_dir():
            count = str(VectorStore(description.path / IN_WORKFLOW, vector.stored).count)
        rows.append([vector.name, vector.table, str(vector.width), vector.dtype, count])
    return rows


def _list_label_files(description: WorkflowDescription) -> list[list[str]]:
    """Return a line for each label that comes from files other than the log."""
    rows = [["label", "files", "key", "within"]]
    for file in description.spec.label_files:
        rows.append([file.name, file.path, ", ".join(file.key), file.within])
    return rows


def _list_sources(description: WorkflowDescription) -> list[list[str]]:
    """Return a line for each source of events."""
    rows = [["source", "time", "known after", "columns"]]
    for rule in description.spec.event_sources:
        names = []
        for column in description.spec.aggregates:
            if column.aggregate and column.aggregate.source == rule.name:
                names.append(column.name)
        rows.append([rule.name, rule.time, rule.known or "-", ", ".join(names)])
    return rows


def _describe_policy(column: CategoricalColumn) -> str:
    if column.hash_buckets:
        return "none: all hashed"
    if column.freq_threshold:
        return f"seen >= {column.freq_threshold} times"
    if column.max_table_size:
        return f"table <= {column.max_table_size}"
    return "all seen"


def _describe_oov_ids(column: CategoricalColumn) -> str:
    last = column.reserved_ids - 1
    return "id 2" if last == 2 else f"ids 2 to {last}, by hash"


def _list_dense(description: WorkflowDescription) -> list[list[str]]:
    rows = [["column", "raw", "missing as", "transform", "mean", "std"]]
    for column in description.spec.dense:
        statistics = description.statistics.get(column.name)
        mean = "-"
        std = "-"
        if statistics:
            mean = f"{statistics['mean']:.6g}"
            std = f"{statistics['std']:.6g}"
        formula = description.spec.get_transform(column).formula
        rows.append([column.name, column.raw, str(column.fill), formula, mean, std])
    return rows


def format_table(rows: list[list[str]]) -> str:
    """Format rows, the first of which is the head; columns of numbers are aligned to the right."""
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
    """Check the digests of a workflow's files, and print its vocabularies, statistics and sizes."""
    description = inspect(settings.workflow)
    description.verify()
    if description.spec.events:
        # Imported here, because it imports Numba, which takes a second of CPU time.
        from nvt_torchrec.workflows.event_state import EventState

        EventState.load(description, verify=True)
    print(report(settings.workflow))
