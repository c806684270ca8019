"""Read the description of a saved workflow and check its graph, without NVTabular.

:mod:`formats.workflow_description` describes the files. The spec in ``metadata.json`` determines
the graph; a ``graph.json`` that differs from the graph of this spec and state is refused. Nothing
that is read is executed: operators and functions are names, looked up in :mod:`workflows.store` and
:mod:`workflows.functions`.

NVTabular's main branch opens the directory with its own ``Workflow.load`` if this package can be
imported, because ``graph.json`` names functions of :mod:`workflows.functions`. Without
``nvt_compat``, hashed ids differ there on a CPU, whose hash function differs from cuDF's. NVTabular
23.8 cannot open the directory.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.base.files.atomic import read_json
from nvt_torchrec.formats.vocabularies import COPY_AGAIN
from nvt_torchrec.formats.workflow_description import GRAPH_FILE, METADATA_FILE, WorkflowDescription
from nvt_torchrec.workflows import nodes


def inspect(path: Path | str) -> WorkflowDescription:
    """Read a saved workflow's description; check the names and sizes of its files, and its graph.

    Raises:
        BadInputError: There is no saved workflow, or a file is missing or damaged.
        SchemaError: Its format has another version.
    """
    description = WorkflowDescription.read(Path(path))
    description.check_sizes()
    _check_graph(description)
    return description


def derive_graph(description: WorkflowDescription) -> dict[str, Any]:
    """Return the content that ``graph.json`` must have."""
    sizes = {vocabulary.name: vocabulary.values for vocabulary in description.vocabularies.values()}
    return nodes.build_graph(description.spec, description.statistics, sizes)


def _check_graph(description: WorkflowDescription) -> None:
    """Check that ``graph.json`` is the graph of the spec, the statistics and the vocabularies."""
    file = description.path / GRAPH_FILE
    graph = read_json(file, "the graph of a saved workflow")
    # As text: in Python True equals 1.
    if json.dumps(graph, sort_keys=True) != json.dumps(derive_graph(description), sort_keys=True):
        raise BadInputError(f"{file}: not the graph of the spec in {METADATA_FILE}", COPY_AGAIN)
