"""The fitted workflow as arrays: hash tables and a few numbers per column.

:func:`build` writes them beside the saved workflow, :func:`load` maps them into memory, and
:meth:`CompiledWorkflow.transform` does what ``nvtabular.Workflow.transform`` does. Nothing here
imports NVTabular, Dask, pandas or torch.
"""

from nvt_torchrec.workflows.compiled.compiled_workflow import CompiledWorkflow
from nvt_torchrec.workflows.compiled.compiler import FILES, build
from nvt_torchrec.workflows.compiled.encoded_rows import EncodedRows, to_table
from nvt_torchrec.workflows.compiled.open_compiled import load

__all__ = ["FILES", "CompiledWorkflow", "EncodedRows", "build", "load", "to_table"]
