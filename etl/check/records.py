"""Checks of the manifest and the workflow, and of both with the data files.

Ids of a part are below the table sizes of the generation that encoded it, not only below those of
today.
"""

from __future__ import annotations

from nvt_torchrec.base.errors import ClickLogError
from nvt_torchrec.etl.check.output import AGAIN, Output
from nvt_torchrec.formats.etl_output import EtlOutput
from nvt_torchrec.formats.manifest import Manifest
from nvt_torchrec.formats.schema import SCHEMA_FILE
from nvt_torchrec.formats.workflow_description import WorkflowDescription

_SAME_COPY = "workflow and data are of different days: restore both from the same copy"
_OTHER_WORKFLOW = "the data were made with another workflow: restore it, or run the ETL again"


def check(output: Output) -> None:
    """Check manifest and workflow; find the table sizes of each part."""
    description = _check_workflow(output)
    manifest = output.manifest
    if manifest is None:
        return
    try:
        _check_files(output, manifest)
        if manifest.format_version == Manifest.VERSION and description is not None:
            _check_generations(output, manifest, description)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        where = EtlOutput(output.path).manifest
        output.error("manifest", where, f"damaged: {error!r}", AGAIN)


def _check_workflow(output: Output) -> WorkflowDescription | None:
    """Check the digests of the saved workflow, and that the data were made with it."""
    path = EtlOutput(output.path).workflow
    expected = output.manifest.workflow_digest if output.manifest else None
    if not path.exists():
        if expected:
            output.error("workflow", path, "missing, but inference needs it", AGAIN)
        return None
    from nvt_torchrec.workflows.description import inspect

    try:
        description = inspect(path)
    except ClickLogError as error:
        output.error("workflow", path, error.what, error.remedy)
        return None
    where = path
    try:
        description.verify()
        if (where := path / "compiled").exists():
            from nvt_torchrec.workflows import compiled  # takes long to import

            compiled.load(path, verify=True)
    except ClickLogError as error:
        output.error("workflow", where, error.what, error.remedy)
        return description
    if expected and description.digest != expected:
        what = f"digest {description.digest[:12]}…, the manifest says {expected[:12]}…"
        output.error("workflow", path, what, _OTHER_WORKFLOW)
    if output.schema and description.table_schema != output.schema:
        what = f"columns or table sizes other than in {output.root / SCHEMA_FILE}"
        output.error("workflow", path, what, _OTHER_WORKFLOW)
    return description


def _check_files(output: Output, manifest: Manifest) -> None:
    """Compare files, bytes, rows and table sizes with the manifest."""
    listed = {part.file: part for part in manifest.files}
    existing = {file for files in output.splits.values() for file in files}
    for name in sorted(listed.keys() - existing):
        output.error("rows", name, "missing, but listed in the manifest", AGAIN)
    for name in sorted(existing - listed.keys()):
        output.error("rows", name, "not in the manifest", "delete it, or else the loader reads it")
    for name in sorted(listed.keys() & output.footers.keys()):
        rows, size = output.footers[name].num_rows, (output.root / name).stat().st_size
        part = listed[name]
        if rows != part.rows:
            output.error("rows", name, f"{rows} rows, the manifest says {part.rows}", AGAIN)
        elif size != part.bytes:
            output.error("rows", name, f"{size} bytes, the manifest says {part.bytes}", AGAIN)
    expected = manifest.num_embeddings_per_feature
    if output.schema and output.schema.num_embeddings_per_feature != expected:
        sizes = output.schema.num_embeddings_per_feature
        output.error(
            "schema",
            output.root / SCHEMA_FILE,
            f"table sizes {sizes}, the manifest says {expected}",
            AGAIN,
        )


def _check_generations(
    output: Output, manifest: Manifest, description: WorkflowDescription
) -> None:
    """Compare the generation with the workflow's, and check what extensions need."""
    paths = EtlOutput(output.path)
    if description.generation != manifest.generation:
        what = f"generation {description.generation}, the manifest says {manifest.generation}"
        output.error("generations", paths.workflow, what, _SAME_COPY)
        return
    if description.generation is None:
        return
    sizes = table_sizes(description)
    output.sizes = {part.file: sizes[part.generation] for part in manifest.files}
    if manifest.settings.get("engine") == "nvtabular":  # keeps nothing for extensions
        return
    from nvt_torchrec.workflows.extension.state import read_state

    try:
        read_state(paths.extension, description)
    except ClickLogError as error:
        what = f"no day can be added: {error.what}"
        output.warning("generations", paths.extension, what, error.remedy)


def table_sizes(description: WorkflowDescription) -> dict[int, dict[str, int]]:
    """Return the rows of each categorical column's table, by generation."""
    return {
        generation.number: {
            column.name: column.reserved_ids + generation.values.get(column.vocabulary_name, 0)
            if not column.hash_buckets
            else description.vocabularies[column.name].table_size
            for column in description.spec.categorical
        }
        for generation in description.lineage
    }
