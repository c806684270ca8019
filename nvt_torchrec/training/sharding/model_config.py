"""Choose a run's model configuration from its settings and its data."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.formats.feature_spec.field_checks import did_you_mean
from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.models.config import ModelConfig
from nvt_torchrec.models.contract import RESERVED_IDS, Columns
from nvt_torchrec.models.registry import MODELS, list_model_flags, load_model
from nvt_torchrec.models.regularization import REGULARIZATION
from nvt_torchrec.training.settings.optimizers import OPTIMIZERS
from nvt_torchrec.training.settings.train_settings import TrainSettings

log = logging.getLogger(__name__)

#: The weight of the linear term, unless it has more than ``_MAX_FIRST_ORDER`` / this many columns.
_FIRST_ORDER = 0.2
#: The largest product of that weight and the number of columns that the linear term sums. With a
#: larger one, SGD diverges on the demo's log, and models of other logs end an epoch worse than the
#: regression that they start from: by up to 0.0017 of AUROC with a weight of 1.7.
_MAX_FIRST_ORDER = 5.0


def model_config(settings: TrainSettings, schema: TableSchema) -> ModelConfig:
    """Return the configuration of the model that ``settings`` ask for, for data with ``schema``.

    Table sizes come from the data unless the settings give them. Published sizes do not count the
    reserved ids; such a size is raised to the size that the data need.

    Raises:
        SettingsError: A given table is too small for the ids in the data, the number of given
            sizes is not the number of categorical columns, or the layers for the dense columns do
            not end with the width of the embeddings.
    """
    columns = Columns(
        dense=schema.dense,
        categorical=schema.categorical,
        num_embeddings=_choose_table_sizes(settings, schema),
        embedding_dim=settings.embedding_dim,
        labels=settings.labels or (schema.label,),
        dense_bins=(settings.dense_bins or 0) if schema.dense else 0,
        histories=schema.histories if settings.max_events else (),
        max_events=(settings.max_events or 0) if schema.histories else 0,
        vocabularies=schema.vocabularies,
        dense_vectors=() if settings.vectors is False else schema.vectors,
    )
    columns = dataclasses.replace(columns, sequences=_choose_sequences(settings, columns))
    if columns.histories and settings.loader == "merlin":
        raise SettingsError(
            "--loader merlin: Merlin's Loader cannot read histories",
            "give --loader kjt, or --max_events 0 to leave the histories out",
        )
    return ModelConfig(
        **vars(columns),
        vector_scale=_choose_vector_scale(settings),
        first_order=_choose_first_order(settings, columns),
        model=settings.model,
        settings=_choose_model_settings(settings, columns),
        hash_indices=bool(settings.hash_indices),
    )


def _choose_model_settings(settings: TrainSettings, columns: Columns) -> dict[str, Any]:
    """Return the JSON-ready settings of the model's ``build`` function."""
    if settings.model not in MODELS:
        return dict(settings.model_settings or {})
    chosen = {name: getattr(settings, name) for name in list_model_flags(settings.model)}
    choose = getattr(load_model(settings.model), "choose_settings", None)
    if choose:
        chosen = choose(chosen, columns)
    # Unused regularization is left out, so that the settings equal those of older checkpoints.
    for name in REGULARIZATION:
        if not chosen[name]:
            del chosen[name]
    for name, value in chosen.items():
        if isinstance(value, tuple):
            chosen[name] = list(value)
    return chosen


def _choose_sequences(settings: TrainSettings, columns: Columns) -> tuple[str, ...]:
    """Return the histories whose events the model gets one by one.

    By default these are all histories if the model is one of this project that attends to events.
    """
    model = settings.model
    known = [history.name for history in columns.histories]
    attends = model in MODELS and MODELS[model].attends
    given = settings.sequences or ()
    for name in given:
        if name not in known:
            raise SettingsError(
                f"--sequences {name}: the data have no such history", did_you_mean(name, known)
            )
    if given and model in MODELS and not attends:
        models = ", ".join(name for name, other in MODELS.items() if other.attends)
        raise SettingsError(
            f"--sequences has no effect with --model {model}, which takes the means of histories",
            f"leave it out, or choose another --model: {models}, or one of your own",
        )
    if given:
        return tuple(name for name in known if name in given)
    return tuple(known) if attends else ()


def _choose_first_order(settings: TrainSettings, columns: Columns) -> float:
    """Return the weight of the linear term."""
    if settings.first_order is not None:
        return settings.first_order
    if settings.embedding_l2:
        # A smaller factor would need larger weights in the tables, which L2 regularizes more.
        return 1.0
    return min(_FIRST_ORDER, round(_MAX_FIRST_ORDER / max(len(columns.vectors), 1), 3))


def _choose_vector_scale(settings: TrainSettings) -> float:
    """Return the factor of the module's vectors; 1 for a custom model.

    :mod:`.own_scale` finds the factor of a custom model later.
    """
    if settings.vector_scale:
        return settings.vector_scale
    known = MODELS.get(settings.model)
    # SGD's steps grow with the square of the scale, so it keeps a scale of 1.
    if known is None or not OPTIMIZERS[settings.table_optimizer].ADAPTIVE:
        return 1.0
    return known.vector_scale


def _choose_table_sizes(settings: TrainSettings, schema: TableSchema) -> tuple[int, ...]:
    """Return the number of table rows for each categorical column."""
    leave_out = "leave the flag out, so that the sizes come from the data"
    paste = f"or paste --num_embeddings_per_feature {schema.num_embeddings_per_feature}"
    if settings.num_embeddings is not None:
        flag = "--num_embeddings"
        sizes = (settings.num_embeddings,) * len(schema.categorical)
    elif settings.num_embeddings_per_feature is not None:
        flag = "--num_embeddings_per_feature"
        sizes = settings.num_embeddings_per_feature
    else:
        flag = ""
        sizes = schema.table_sizes
    if len(sizes) != len(schema.categorical):
        raise SettingsError(
            f"{flag} has {len(sizes)} sizes, but the data have {len(schema.categorical)} "
            f"categorical columns ({schema.categorical[0]} … {schema.categorical[-1]})",
            f"{leave_out}, {paste}",
        )
    if settings.hash_indices:
        return _limit_shared_sizes(settings, schema, flag, sizes)
    too_small = []
    raised = []
    chosen = []
    for name, given, needed in zip(schema.categorical, sizes, schema.table_sizes, strict=True):
        chosen.append(max(given, needed))
        if needed - given > RESERVED_IDS:
            too_small.append(
                f"column {name} needs {needed} rows (its largest id + 1) and gets {given}"
            )
        elif given < needed:
            raised.append(f"{name} {given} → {needed}")
    if too_small:
        raise SettingsError(
            f"{flag}: table too small: {'; '.join(too_small)}",
            f"{leave_out}, {paste}; if tables of that size do not fit into memory, --hash_indices "
            "lets ids share rows",
        )
    if raised:
        log.info("%s: sizes raised to hold the reserved ids: %s", flag, ", ".join(raised))
    return tuple(chosen)


def _limit_shared_sizes(
    settings: TrainSettings, schema: TableSchema, flag: str, sizes: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the sizes of tables whose ids share rows (``--hash_indices``)."""
    limit = settings.max_table_size or max(sizes, default=0)
    limited = tuple(min(size, limit) for size in sizes)
    for name, rows, needed in zip(schema.categorical, limited, schema.table_sizes, strict=True):
        if rows < needed and rows <= RESERVED_IDS:
            raise SettingsError(
                f"{flag}: column {name} needs {needed} rows and gets {rows}, which the reserved "
                f"ids 0 to {RESERVED_IDS - 1} take",
                f"give it more than {RESERVED_IDS} rows",
            )
        if rows < needed and name == settings.gauc_column:
            raise SettingsError(
                f"--gauc_column {name}: its ids share rows, so a group would mix several ids",
                f"give it a table of {needed} rows, or another --gauc_column",
            )
    return limited
