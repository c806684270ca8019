"""``python -m etl import``: convert a workflow that NVTabular pickled."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import ClassVar

from nvt_torchrec.base.command_line import Settings, flag
from nvt_torchrec.base.errors import BadInputError

#: For the command's help.
DESCRIPTION = (
    "Converts a workflow that NVTabular 23.08 pickled to a saved workflow of this project, "
    "OUT/workflow."
)


@dataclasses.dataclass(frozen=True)
class ImportSettings(Settings):
    """The settings of ``python -m etl import``."""

    HINTS: ClassVar = dict.fromkeys(
        ("--num_embeddings_per_feature", "--modulo", "--workers", "--resume", "--restart"),
        "it was for data in .npy and .bin files, which are not imported any more: make parquet "
        "from the raw log with `python -m etl run`",
    )

    # fmt: off
    input_path: Path = flag("directory of a workflow.pkl", metavar="DIR")
    output_path: Path = flag("absent or empty directory", metavar="OUT")
    trust_pickle: bool = flag(
        "open the workflow.pkl, which runs any code in it: only for files that you trust", False
    )
    spec: str | None = flag(
        "feature spec of the raw rows that the workflow was fitted on (default: from the "
        "workflow: integers are int, text is string)", None, metavar="TOML"
    )
    # fmt: on


SETTINGS = (ImportSettings,)


def run(settings: ImportSettings) -> None:
    """Convert, and print what was written.

    Raises:
        BadInputError: The input is not a pickled workflow, is damaged, or is not trusted.
        SchemaError: The workflow has operators that cannot be converted.
        OutputError: The output directory cannot be used.
    """
    if not (settings.input_path / "workflow.pkl").exists():
        raise BadInputError(
            f"{settings.input_path}: no workflow.pkl; data in .npy or .bin files are not imported "
            "any more",
            "make parquet from the raw log with `python -m etl run`",
        )
    from nvt_torchrec.etl.pickled_workflow import import_workflow

    description = import_workflow(
        settings.input_path,
        settings.output_path,
        trust_pickle=settings.trust_pickle,
        spec=settings.spec,
    )
    print(f"{settings.output_path / 'workflow'}: digest {description.digest}")
    print(f"--num_embeddings_per_feature {description.table_schema.num_embeddings_per_feature}")
