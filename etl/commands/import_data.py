"""``python -m etl import``: import what other tools preprocessed."""

from __future__ import annotations

from clicklog.errors import SettingsError
from etl.settings import ImportSettings

DESCRIPTION = (
    "Imports TorchRec's .npy sets, TorchRec's and NVIDIA's split binary sets (as parquet in "
    "OUT) and workflows that NVTabular 23.08 pickled (as OUT/workflow)."
)
SETTINGS = (ImportSettings,)


def run(settings: ImportSettings) -> None:
    """Import, and print what was written.

    Raises:
        BadInputError: The input cannot be imported, or is damaged.
        SettingsError: A setting is of no use for what is imported.
        OutputError: The output directory cannot be used.
    """
    if (settings.input_path / "workflow.pkl").exists():
        _refuse(
            settings,
            ("num_embeddings_per_feature", "modulo", "resume", "restart"),
            "a workflow.pkl",
        )
        from etl.importers.workflow import import_workflow

        description = import_workflow(
            settings.input_path,
            settings.output_path,
            trust_pickle=settings.trust_pickle,
            spec=settings.spec,
        )
        print(f"{settings.output_path / 'workflow'}: digest {description.digest}")
        sizes = description.table_schema.num_embeddings_per_feature
        print(f"--num_embeddings_per_feature {sizes}")
        return
    _refuse(settings, ("trust_pickle", "spec"), "no workflow.pkl")
    _run_arrays(settings)


def _refuse(settings: ImportSettings, flags: tuple[str, ...], what: str) -> None:
    """Refuse flags that have no effect on this kind of input."""
    for flag in flags:
        if getattr(settings, flag):
            raise SettingsError(
                f"--{flag} is set, and {settings.input_path} holds {what}",
                "leave the flag out, or correct --input_path",
            )


def _run_arrays(settings: ImportSettings) -> None:
    from tqdm import tqdm

    from etl.importers.arrays import find_source
    from etl.importers.parts import import_arrays

    source = find_source(settings.input_path)
    total = sum(rows.end - rows.begin for rows in source.sets)
    print(f"{settings.input_path}: {source.kind}, {total} rows")
    with tqdm(desc="import", total=total, unit="rows", unit_scale=True, disable=None) as bar:
        manifest = import_arrays(source, settings, bar.update)
    for split, counts in manifest["splits"].items():
        print(f"{split:5} {counts['rows']} rows")
    print(f"--num_embeddings_per_feature {manifest['num_embeddings_per_feature']}")
