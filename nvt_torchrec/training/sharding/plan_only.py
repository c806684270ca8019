"""Plan the sharding for hardware that need not be present (``--plan_only``)."""

from __future__ import annotations

from pathlib import Path

from nvt_torchrec.formats.schema import SCHEMA_FILE, TableSchema
from nvt_torchrec.models.contract import load_build
from nvt_torchrec.training.data.choices import choose_sizes
from nvt_torchrec.training.optim.combined import fuse_table_optimizer
from nvt_torchrec.training.optim.learning_rates import fill_rates
from nvt_torchrec.training.settings.sizes import SIZES
from nvt_torchrec.training.settings.train_settings import TrainSettings, fill_sizes
from nvt_torchrec.training.sharding.model_config import model_config
from nvt_torchrec.training.sharding.planning import (
    GIB,
    RESERVED,
    Hardware,
    TablePlan,
    choose_sharding,
    describe_fit,
    make_plan,
    sum_gib_per_rank,
)
from nvt_torchrec.training.sharding.train_model import TrainModel, build_model

#: The memory per GPU, unless ``--hbm_gib`` gives another one.
DEFAULT_HBM_GIB = 80.0
#: The number of GPUs per machine that plans assume.
GPUS_PER_MACHINE = 8


def plan_only(settings: TrainSettings) -> str:
    """Return the plan for ``--plan_only`` GPUs with ``--hbm_gib`` each, as text.

    No GPU is used. The plan assumes machines of 8 GPUs whose main memory is as large as the memory
    of their GPUs. Without data at ``--binary_path``, ``--num_embeddings_per_feature`` gives the
    tables.

    Raises:
        SettingsError: The tables do not fit.
        BadInputError: Neither data nor sizes are given.
    """
    sizes = settings.num_embeddings_per_feature
    ranks = settings.plan_only or 1
    if sizes and not (Path(settings.binary_path) / SCHEMA_FILE).exists():
        settings = fill_sizes(settings, SIZES["large"].min_rows, ranks)
        names = tuple(f"cat_{i}" for i in range(len(sizes)))
        schema = TableSchema(("label",), tuple(f"int_{i}" for i in range(13)), names, sizes)
    else:
        schema = TableSchema.read(settings.binary_path)
        settings = choose_sizes(settings, schema, ranks)
    config = model_config(settings, schema)
    settings = choose_sharding(settings, config, "cuda")
    memory = int((settings.hbm_gib or DEFAULT_HBM_GIB) * GIB)
    hardware = Hardware(ranks, min(ranks, GPUS_PER_MACHINE), "cuda", memory, memory)
    build = load_build(settings.model)
    unsharded = build_model(config, table_precision=settings.table_precision, build=build)
    model = TrainModel(unsharded, ranks)
    settings = fill_rates(settings, config, ranks * settings.batch_size, 1)
    fuse_table_optimizer(unsharded.sparse_arch, settings)
    _, tables = make_plan(model, config, settings, hardware)
    return f"{format_plan(tables, hardware)}\n{describe_fit(tables)}"


def format_plan(tables: list[TablePlan], hardware: Hardware) -> str:
    """Format a plan as text: one line per table, and the GiB per rank."""
    width = max(len(table.table) for table in tables)
    lines = [
        f"{'table':{width}} {'rows':>13} {'dim':>4} {'GPU GiB':>9} {'host GiB':>9}  "
        f"{'sharding':14} {'kernel':17} ranks"
    ]
    for table in tables:
        ranks = ",".join(map(str, sorted(set(table.ranks))))
        lines.append(
            f"{table.table:{width}} {table.rows:13,} {table.dim:4} {sum(table.gpu) / GIB:9.3f} "
            f"{sum(table.host) / GIB:9.3f}  {table.sharding:14} {table.kernel:17} {ranks}"
        )
    usable = hardware.memory * (1 - RESERVED) / GIB
    per_rank = " ".join(f"{gib:.2f}" for gib in sum_gib_per_rank(tables, hardware))
    lines.append(
        f"GiB per rank: {per_rank}; each rank has {hardware.memory / GIB:.1f}, {usable:.1f} of it "
        "for tables"
    )
    return "\n".join(lines)
