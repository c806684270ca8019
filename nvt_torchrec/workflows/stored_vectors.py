"""The vectors beside a saved workflow, opened with it."""

from __future__ import annotations

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.base.files.artifact import check_digests, check_sizes
from nvt_torchrec.formats.vectors import (
    IN_WORKFLOW,
    VectorStores,
    select_vectors,
    vector_files,
)
from nvt_torchrec.formats.vocabularies import COPY_AGAIN
from nvt_torchrec.formats.workflow_description import WorkflowDescription


def open_vectors(description: WorkflowDescription, *, verify: bool) -> VectorStores | None:
    """Open the vectors beside a saved workflow; None for a spec without.

    Raises:
        BadInputError: A file is missing or damaged.
    """
    if not description.spec.vectors:
        return None
    files = select_vectors(description.files)
    check_sizes(description.path, files, COPY_AGAIN)
    if verify:
        check_digests(description.path, files, COPY_AGAIN)
    stores = VectorStores(
        description.path / IN_WORKFLOW, [vector.stored for vector in description.spec.vectors]
    )
    for store in stores.stores:
        listed = vector_files(store.vectors.name, files)
        if len(store.parts) != len(listed):
            raise BadInputError(
                f"{store.root}: {len(store.parts)} parts, where the workflow lists {len(listed)}",
                COPY_AGAIN,
            )
    return stores
