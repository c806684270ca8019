"""The vectors of a saved workflow: open them, and gather those of rows to score.

:mod:`formats.vectors` describes the files.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.base.files.artifact import check_digests, check_sizes
from nvt_torchrec.formats.given_vectors import GivenVectors
from nvt_torchrec.formats.vectors import (
    IN_WORKFLOW,
    VectorStores,
    list_vector_files,
    select_vectors,
)
from nvt_torchrec.formats.vocabularies import COPY_AGAIN
from nvt_torchrec.formats.workflow_description import WorkflowDescription


def open_vectors(description: WorkflowDescription, *, verify: bool) -> VectorStores | None:
    """Open the vectors of a saved workflow; None for a spec without vectors.

    Args:
        description: The workflow's description, which lists the files.
        verify: Read the files, and compare their digests.

    Raises:
        BadInputError: A file is missing or damaged.
    """
    if not description.spec.vectors:
        return None
    files = select_vectors(description.files)
    if files and not (description.path / IN_WORKFLOW).is_dir():
        raise BadInputError(
            f"{description.path / IN_WORKFLOW}: missing; a bundle of a model without vectors does "
            "not contain it",
            "pass OUT/workflow, from which the bundle was made; or copy the directory again",
        )
    check_sizes(description.path, files, COPY_AGAIN)
    if verify:
        check_digests(description.path, files, COPY_AGAIN)
    stores = VectorStores(
        description.path / IN_WORKFLOW, [vector.stored for vector in description.spec.vectors]
    )
    for store in stores.stores:
        listed = list_vector_files(store.vectors.name, files)
        if len(store.parts) != len(listed):
            raise BadInputError(
                f"{store.root}: {len(store.parts)} parts, but the workflow lists {len(listed)}",
                COPY_AGAIN,
            )
    return stores


def gather_vectors(
    stores: VectorStores, numbers: np.ndarray, given: Mapping[str, GivenVectors]
) -> np.ndarray:
    """Return ``dense_vectors`` of rows: vectors that rows bring themselves, else the stored ones.

    Args:
        stores: The stored vectors.
        numbers: int32 [vectors, n], the number of each row's vector; -1 for none.
        given: The vectors that rows bring, by name.

    Returns:
        float32 [n, sum of (width + 1)], see :mod:`formats.vectors`.

    Raises:
        BadInputError: A file was written to since it was opened.
        SchemaError: A file is damaged: a number is out of range, or a value is not finite.
    """
    stores.check()
    taken = stores.take(numbers)
    end = 0
    for vector in stores.vectors:
        begin, end = end, end + vector.num_inputs
        if vector.name in given:
            own = given[vector.name]
            taken[:, begin:end] = own.values[own.index]
    return taken
