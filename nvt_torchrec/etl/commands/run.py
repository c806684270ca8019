"""``python -m etl run``: from a raw log to a saved workflow and training parquet."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping

from nvt_torchrec.base.command_line import Settings, flag
from nvt_torchrec.base.errors import adapt_commands
from nvt_torchrec.etl.settings import EtlSettings
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.columns import DENSE_TRANSFORMS
from nvt_torchrec.formats.feature_spec.spec_variants import replace_policy

logger = logging.getLogger(__name__)

DESCRIPTION = (
    "Fit a Workflow on all days but the last, save it to OUT/workflow, and write "
    "OUT/criteo_binary/split/{train,valid,test}. Unless the spec's [split] says otherwise, the "
    "last day is halved into valid and test; a log of one day is split 80/10/10. The same "
    "command continues an interrupted run."
)


@dataclasses.dataclass(frozen=True)
class RunOptions(Settings):
    """The flags that change the feature spec."""

    # fmt: off
    freq_threshold: int | None = flag(
        "values that occur fewer than T times are out of vocabulary", None, metavar="T",
        excludes=("max_table_size",)
    )
    max_table_size: int | None = flag(
        "maximum number of rows of an embedding table, including the 3 reserved ids; the most "
        "frequent values are kept", None, metavar="M"
    )
    dense: str | None = flag(
        "transform of the dense columns for which the spec sets none", None,
        choices=DENSE_TRANSFORMS)
    # fmt: on

    def apply(self, spec: FeatureSpec) -> FeatureSpec:
        """Return the spec with these flags applied.

        Raises:
            SettingsError: A value is not allowed.
        """
        if self.freq_threshold is not None:
            spec = replace_policy(spec, freq_threshold=self.freq_threshold, max_table_size=0)
        if self.max_table_size is not None:
            spec = replace_policy(spec, max_table_size=self.max_table_size, freq_threshold=0)
        if self.dense:
            spec = dataclasses.replace(spec, dense_transform=self.dense)
        return spec


SETTINGS = (EtlSettings, RunOptions)


def describe_rows(rows: Mapping[str, int]) -> str:
    """Describe the row counts of a manifest (its ``rows``) in words."""
    described = f"{rows['in']} rows in, {rows['out']} out, {rows['rejected']} rejected"
    if rows.get("waiting"):
        described += f", {rows['waiting']} waiting for their clicks"
    return described


def run(settings: EtlSettings, options: RunOptions) -> None:
    """Run the ETL.

    Raises:
        ClickLogError: A setting is not allowed, or what :func:`etl.run.run` raises.
    """
    import nvt_torchrec.etl.run
    from nvt_torchrec.base.files.atomic import read_json
    from nvt_torchrec.base.versions import find_installed_version, make_install_command
    from nvt_torchrec.formats.etl_output import EtlOutput

    settings = dataclasses.replace(settings, spec=options.apply(settings.spec))
    manifest = nvt_torchrec.etl.run.run(settings)
    rows = manifest["rows"]
    print(describe_rows(rows))
    timings = read_json(EtlOutput(settings.output_path).timings, "the run's timings")
    if timings["rows_per_s"]:  # None after an interruption
        speed = f"{timings['rows_per_s']} rows/s, {timings['text_mb_per_s']} MB/s of input"
        stages = "make events, fit and transform"
        if "events" not in timings["seconds"]:
            stages = "fit and transform"
        print(f"{speed} to {stages}")
    print(f"--num_embeddings_per_feature {manifest['num_embeddings_per_feature']}")
    paths = EtlOutput(settings.output_path)
    logger.info("look at %s; train on it:", paths.report)
    if find_installed_version("torchrec") is None:
        logger.info("(where TorchRec is installed: %s)", make_install_command("cpu"))
    command = "python train_torchrec.py --binary_path %s --save_checkpoint_path CKPT"
    logger.info(adapt_commands(command), paths.splits)
