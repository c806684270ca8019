"""Write and read bundles: a workflow and a model in one movable directory, all that a server needs.

Layout::

    bundle.json            the model, digest and generation of the workflow, where the weights come
                           from (:class:`.served_checkpoint.Origin`); size and SHA-256 of every
                           other file, and its own BLAKE2b digest. Written last
    workflow/              the saved workflow, with its compiled form, tables and vectors
    .merlin/schema.json    columns and table sizes
    weights/table.npy      [rows of all tables, embedding dim], one table after the other: float32,
                           float16, or uint8 with weights/ranges.npy, float32 [rows, 2 or more]; see
                           :mod:`inference.model.scoring`
    weights/NAME.npy       the weights of the layers, by their names in :class:`models.head.Head`
    weights/head.onnx      instead of these, the layers of a custom model as ONNX
                           (:mod:`models.onnx_head`)
    reference/NAME.npy     encoded rows and their scores (:mod:`.reference`)

A bundle contains no pickle and no absolute path. The table is mapped into memory, not read: opening
a bundle takes the same time for any table size, and the processes of a machine share the table.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
from pathlib import Path

import numpy as np
import torch

from nvt_torchrec.base import __version__
from nvt_torchrec.base.errors import (
    BadInputError,
    ClickLogError,
    OutputError,
    SchemaError,
    SettingsError,
)
from nvt_torchrec.base.files.artifact import FileEntry, Format, check_digests, check_sizes
from nvt_torchrec.base.files.atomic import new_directory
from nvt_torchrec.base.finite import find_not_finite
from nvt_torchrec.formats.etl_output import EtlOutput
from nvt_torchrec.formats.table_files import list_table_files
from nvt_torchrec.formats.vectors import select_vectors
from nvt_torchrec.formats.workflow_description import METADATA_FILE, WorkflowDescription
from nvt_torchrec.inference.model import reference
from nvt_torchrec.inference.model.scoring import KINDS, ServingModel
from nvt_torchrec.inference.model.served_checkpoint import Origin, check_pair, read_checkpoint
from nvt_torchrec.inference.model.weight_files import (
    list_weight_files,
    list_weights,
    load_head,
    load_table,
    save_array,
    write_weights,
)
from nvt_torchrec.models.checkpoint.record import MODEL_FILE, compute_digest
from nvt_torchrec.models.config import ModelConfig
from nvt_torchrec.models.contract import Build
from nvt_torchrec.models.onnx_head import OnnxHead, export_head
from nvt_torchrec.workflows import compiled
from nvt_torchrec.workflows.description import inspect
from nvt_torchrec.workflows.event_state_arrays import list_event_files

FORMAT = Format(
    "nvt-torchrec bundle",
    6,
    "a bundle of `python -m inference bundle`",
    version_key="version",
    digest_key="blake2b",
    foreign=SchemaError,
)
BUNDLE_FILE = "bundle.json"
WORKFLOW = "workflow"
WEIGHTS = "weights"
#: The number of digits of a bundle's digest that name it in headers, metrics and directories.
_NAME_DIGITS = 12
_REMEDY = "copy the whole bundle again, or make it again with `python -m inference bundle`"


def write_bundle(
    workflow: Path | str,
    checkpoint: Path | str,
    path: Path | str,
    *,
    tables: str = "float32",
    build: Build | None = None,
) -> bool:
    """Put a saved workflow and a training checkpoint into a new directory ``path``.

    ``bundle.json`` gets the checkpoint's modification time, which tells when a model was trained.

    Args:
        workflow: The directory of the workflow.
        checkpoint: The directory of the checkpoint.
        path: The directory of the bundle.
        tables: The type of the embeddings, one of :data:`inference.model.scoring.KINDS`.
        build: The function that builds the module of a custom model.

    Returns:
        True if the bundle was written. False if ``path`` already is a bundle of the same checkpoint
        and workflow; the workflow may have been extended since.

    Raises:
        BadInputError: The workflow or the checkpoint is missing or damaged; all bytes are checked.
        SchemaError: The checkpoint was trained on data of another workflow.
        OutputError: ``path`` exists, or cannot be written.
    """
    workflow = Path(workflow)
    path = Path(path)
    if workflow.name == EtlOutput(workflow.parent).workflow.name:
        EtlOutput(workflow.absolute().parent).check_whole()
    description = inspect(workflow)
    if is_bundle(path) and _is_made_from(path, description, checkpoint, tables):
        return False
    if path.exists() or path.is_symlink():
        raise OutputError(
            f"{path} exists but is not a bundle of this workflow and checkpoint",
            "choose another --output, or remove it first",
        )
    description.verify()
    model, made_from = read_checkpoint(checkpoint, torch.device("cpu"), build)
    trained_on = made_from.workflow_digest
    _check_generation(description, trained_on, workflow, checkpoint)
    opened = compiled.load(workflow, verify=True)
    check_pair(opened.schema, opened.digest, model.config, trained_on, workflow, checkpoint)
    versions = {
        "nvt-torchrec": __version__,
        "torch": str(torch.__version__),
        "numpy": np.__version__,
    }
    trained = (Path(checkpoint) / MODEL_FILE).stat().st_mtime
    save_bundle(path, workflow, model.convert(tables), Origin(made_from, versions), trained)
    return True


def _is_made_from(
    path: Path, workflow: WorkflowDescription, checkpoint: Path | str, tables: str
) -> bool:
    """Return True if the bundle at ``path`` has this workflow, checkpoint and type of tables."""
    bundle = read_description(path, check=True)
    if bundle.tables != tables or bundle.origin.checkpoint.digest != compute_digest(checkpoint):
        return False
    if bundle.workflow_digest != workflow.digest:
        return workflow.ancestor(bundle.workflow_digest) is not None
    # Adding a day may change the files of events, tables and vectors without changing the
    # workflow's digest, which only covers the files that encode columns.
    vectors = select_vectors(workflow.files) if bundle.model.dense_vectors else {}
    for name in (*list_event_files(workflow.spec), *list_table_files(workflow.spec), *vectors):
        entry = bundle.files.get(f"{WORKFLOW}/{name}")
        if entry is None or entry.difference(workflow.path / name):
            return False
    return True


def _check_generation(
    description: WorkflowDescription, trained_on: str, workflow: Path, checkpoint: Path | str
) -> None:
    """Refuse a checkpoint of an earlier generation of the workflow.

    :func:`check_pair` would refuse it too, but without a remedy that fits.
    """
    ancestor = description.ancestor(trained_on)
    if ancestor is not None and ancestor.digest != description.digest:
        raise SchemaError(
            f"{checkpoint} was trained on generation {ancestor.number} of the workflow, but "
            f"{workflow} is at generation {description.generation}",
            f"train with --continue_from {checkpoint} on the data of generation "
            f"{description.generation}, and bundle the new checkpoint",
        )


def save_bundle(
    path: Path, workflow: Path, model: ServingModel, origin: Origin, trained: float | None = None
) -> None:
    """Put a workflow and a model into a new directory; leave out vectors that the model ignores.

    Args:
        path: The directory to create.
        workflow: The directory of the workflow.
        model: The model, on the CPU.
        origin: Where the weights come from.
        trained: The time at which the model was trained, in seconds since 1970; None if unknown.

    Raises:
        OutputError: ``path`` exists or cannot be written.
        SettingsError: The model is a user's own and cannot be exported to ONNX.
    """
    if model.config.own:
        model = export_own_head(model)
    description = inspect(workflow)
    with new_directory(path) as temporary:
        events = list_event_files(description.spec)
        copied = [METADATA_FILE, *description.files, *compiled.FILES, *events]
        if not model.config.dense_vectors:
            vectors = select_vectors(description.files)
            copied = [name for name in copied if name not in vectors]
        for name in copied:
            file = temporary / WORKFLOW / name
            file.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(workflow / name, file)
        description.table_schema.write(temporary)
        write_weights(temporary / WEIGHTS, model)
        (temporary / reference.FOLDER).mkdir()
        for name, array in reference.make_rows(workflow, description.table_schema, model).items():
            save_array(temporary / reference.FOLDER / f"{name}.npy", array)
        files: dict[str, dict] = {}
        for file in sorted(file for file in temporary.rglob("*") if file.is_file()):
            files[str(file.relative_to(temporary))] = FileEntry.from_file(file).to_dict()
        content = {
            "workflow_digest": description.digest,
            "generation": description.generation,
            "origin": dataclasses.asdict(origin),
            "model": model.config.to_dict(),
            "tables": model.table.kind,
            "files": files,
        }
        FORMAT.write(temporary / BUNDLE_FILE, content)
        if trained is not None:
            os.utime(temporary / BUNDLE_FILE, (trained, trained))


def export_own_head(model: ServingModel) -> ServingModel:
    """Replace the head of a custom model by its ONNX form, which ONNX Runtime executes.

    Raises:
        SettingsError: The head cannot be exported.
    """
    config = model.config
    if isinstance(model.head, OnnxHead):
        return model
    try:
        head = OnnxHead(export_head(model.head, config), config)
    except ClickLogError:
        raise
    except Exception as error:  # PyTorch's exporter raises errors of many types
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise SettingsError(
            f"--model {config.model} cannot be exported to ONNX: {type(error).__name__}: {reason}",
            "docs/models.md lists the operations that a model of your own may use",
        ) from error
    return ServingModel.make(model.table, config, head)


def read_bundle(
    path: Path | str, device: torch.device, *, check: bool = False
) -> tuple[compiled.CompiledWorkflow, ServingModel]:
    """Open a bundle.

    Args:
        path: The directory of the bundle.
        device: The device of the model. On the CPU its table stays on disk, and is mapped.
        check: Read all files, compare their SHA-256, and refuse tables that are not finite. The
            weights of the layers are always checked.

    Raises:
        BadInputError: ``path`` is not a bundle, a file is missing or damaged, or a weight is not
            finite.
        SchemaError: The bundle has an unsupported version, or its parts do not belong together.
    """
    path = Path(path)
    description = read_description(path, check=check)
    if not check:
        _check_small_files(path, description)
    has_vectors = bool(description.model.dense_vectors)
    workflow = compiled.load(path / WORKFLOW, verify=check, vectors=has_vectors)
    if workflow.digest != description.workflow_digest:
        raise SchemaError(
            f"{path}: its workflow has been replaced (digest {workflow.digest[:12]}… instead of "
            f"{description.workflow_digest[:12]}…)",
            _REMEDY,
        )
    config = description.model
    trained_on = description.origin.checkpoint.workflow_digest
    check_pair(workflow.schema, workflow.digest, config, trained_on, path / WORKFLOW, path)
    try:
        head = load_head(path / WEIGHTS, config, device)
        table = load_table(path / WEIGHTS, description.tables, config).to(device)
        model = ServingModel.make(table, config, head)
        # A file that bundle.json does not list has no digest, so no other check would notice it.
        for file in list_weight_files(model):
            name = f"{WEIGHTS}/{file}"
            if name not in description.files:
                raise ValueError(f"{BUNDLE_FILE} does not list {name}")
    except (ValueError, OSError, SchemaError) as error:
        raise BadInputError(f"{path} is damaged: {error}", _REMEDY) from error
    _check_finite(path, model, tables=check)
    return workflow, model


def _check_small_files(path: Path, description: BundleDescription) -> None:
    """Verify the digests of the files that are read as a whole whenever a bundle is opened.

    These are the weights of the layers, and JSON files. Tables and vocabularies are mapped;
    verifying their digests would take as long as reading them.
    """
    tables = (f"{WEIGHTS}/table.npy", f"{WEIGHTS}/ranges.npy")
    small_files: dict[str, FileEntry] = {}
    for name, entry in description.files.items():
        is_layer = name.startswith(WEIGHTS) and name not in tables
        if is_layer or name.endswith(".json"):
            small_files[name] = entry
    check_digests(path, small_files, _REMEDY)


def _check_finite(path: Path, model: ServingModel, *, tables: bool) -> None:
    """Refuse weights that are not finite; with ``tables`` check the embedding tables as well."""
    weights = list_weights(model)
    if not tables:
        del weights["table"]
    name = find_not_finite(weights)
    if name:
        raise BadInputError(
            f"{path / WEIGHTS / name}.npy holds values that are not finite: training diverged, and "
            "scores would be NaN",
            "make the bundle again from an earlier checkpoint",
        )


def is_bundle(path: Path | str) -> bool:
    """Return True if the directory is a bundle."""
    return (Path(path) / BUNDLE_FILE).is_file()


@dataclasses.dataclass(frozen=True)
class BundleDescription:
    """The content of ``bundle.json``.

    Attributes:
        workflow_digest: The digest of the workflow in the bundle.
        model: The model.
        files: Size and SHA-256 of the other files, by path relative to the bundle.
        tables: The type of the embeddings.
        generation: The generation of the workflow.
        origin: Where the weights come from.
    """

    workflow_digest: str
    model: ModelConfig
    files: dict[str, FileEntry]
    tables: str
    generation: int
    origin: Origin

    def __post_init__(self) -> None:
        if self.tables not in KINDS:
            raise ValueError(f"tables {self.tables!r:.60}")


def read_description(path: Path | str, *, check: bool = False) -> BundleDescription:
    """Read ``bundle.json``; check the sizes of the other files and, with ``check``, their digests.

    Raises:
        BadInputError: ``path`` is not a bundle, or a file is missing or damaged.
        SchemaError: The bundle has an unsupported version.
    """
    path = Path(path)
    description = FORMAT.read(BundleDescription, path / BUNDLE_FILE, _REMEDY)
    check_sizes(path, description.files, _REMEDY)
    if check:
        check_digests(path, description.files, _REMEDY)
    return description


def compute_bundle_digest(path: Path | str) -> str:
    """Return the SHA-256 of ``bundle.json``, which identifies the bundle: it lists all digests."""
    return hashlib.sha256((Path(path) / BUNDLE_FILE).read_bytes()).hexdigest()


def make_bundle_name(digest: str) -> str:
    """Return the first digits of a bundle's digest, which name it."""
    return digest[:_NAME_DIGITS]
