"""The shape of the model, from settings and data or from a checkpoint."""

from __future__ import annotations

import dataclasses
import logging
import math
from typing import Any

from nvt_torchrec.base.command_line import as_text
from nvt_torchrec.base.errors import SchemaError, SettingsError
from nvt_torchrec.base.files.validation import convert
from nvt_torchrec.dlrm.interactions import INTERACTIONS, DotProducts, Interaction, sizes_of
from nvt_torchrec.dlrm.settings.train_settings import TrainSettings
from nvt_torchrec.formats.feature_spec.columns import FIRST_OOV_ID
from nvt_torchrec.formats.feature_spec.feature_spec import MAX_COLUMNS
from nvt_torchrec.formats.schema import LARGEST_TABLE, TableSchema

log = logging.getLogger(__name__)

#: The factor of the first-order term, and the largest one times the columns that it sums. With
#: more, SGD diverges on the demo's log, and other logs end an epoch below the regression that they
#: start from, by up to 0.0017 of AUROC with a factor of 1.7.
_FIRST_ORDER, _MOST_FIRST_ORDER = 0.2, 5.0
#: The ids of each table that belong to no value: padding, null and out of vocabulary.
_RESERVED_IDS = FIRST_OOV_ID + 1


@dataclasses.dataclass(frozen=True)
class _Shape:
    """The columns of a model, and the layers that every interaction has."""

    dense: tuple[str, ...]
    categorical: tuple[str, ...]
    num_embeddings: tuple[int, ...]
    embedding_dim: int
    dense_arch_layer_sizes: tuple[int, ...]
    over_arch_layer_sizes: tuple[int, ...]
    first_order: float

    def __post_init__(self) -> None:
        over, dense = self.over_arch_layer_sizes, self.dense_arch_layer_sizes
        if len(self.categorical) != len(self.num_embeddings):
            raise SchemaError(
                f"{len(self.categorical)} categorical features, "
                f"{len(self.num_embeddings)} table sizes"
            )
        last = (self.embedding_dim,) if self.dense else ()
        if dense[-1:] != last or len(over) < 2 or over[-1] != 1:
            raise SchemaError(
                f"no DLRM of {len(self.dense)} dense features has embedding_dim "
                f"{self.embedding_dim}, dense_arch_layer_sizes {dense} and over_arch_layer_sizes "
                f"{over}"
            )
        if not 0 <= self.first_order < math.inf:
            raise SchemaError(f"no DLRM has first_order {self.first_order}")


@dataclasses.dataclass(frozen=True)
class ModelConfig(_Shape):
    """The shape of a DLRM.

    Attributes:
        dense: The names of the dense features, in the order of the columns of ``dense_features``.
            Without any, the model has no layers for them and the interaction no dense vector.
        categorical: The names of the categorical features: the keys of the KeyedJaggedTensor.
        num_embeddings: The rows of each feature's table.
        embedding_dim: The width of all tables.
        dense_arch_layer_sizes: The layers for the dense features; the last is ``embedding_dim``.
            Empty without dense features.
        over_arch_layer_sizes: The layers above the interaction, at least two; the last is 1.
        first_order: The factor of the first-order term (:class:`dlrm.model.FirstOrder`); 0: the
            model has none.
        interaction: How dense features and embeddings are combined.

    Raises:
        SchemaError: The values do not make a DLRM.
    """

    interaction: Interaction = dataclasses.field(default_factory=DotProducts)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, sizes in self.to_dict().items():
            layers = sizes if name == "dcn_num_layers" else 0
            count = len(sizes) if isinstance(sizes, tuple) else layers
            if count > MAX_COLUMNS:  # each takes time and memory, before the weights are looked for
                raise SchemaError(f"no DLRM has {count} {name}")
            for size in sizes if isinstance(sizes, tuple) else (sizes,):
                if isinstance(size, int) and not 1 <= size <= LARGEST_TABLE:
                    raise SchemaError(f"no DLRM has a size of {size} in {name}")
        vectors = len(self.categorical) + bool(self.dense)
        if vectors < self.interaction.LEAST_VECTORS:
            raise SchemaError(
                "no dense column and one categorical column: dot products need two vectors",
                "choose --interaction_type dcn",
            )

    @property
    def table_names(self) -> list[str]:
        """The names of the tables, ``t_<feature>`` as in TorchRec's examples."""
        return [f"t_{name}" for name in self.categorical]

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict, which :meth:`from_dict` reads."""
        value = {field.name: getattr(self, field.name) for field in dataclasses.fields(_Shape)}
        return {**value, "interaction_type": self.interaction.NAME, **vars(self.interaction)}

    @classmethod
    def from_dict(cls, value: Any) -> ModelConfig:
        """Read what :meth:`to_dict` returned.

        Raises:
            SchemaError: A key is missing or unknown, or its value is of another type.
        """
        value = dict(value) if isinstance(value, dict) else {}
        try:
            name = convert(str, value.pop("interaction_type", None), "interaction_type")
            if name not in INTERACTIONS:
                raise ValueError(f"interaction_type {name!r:.60} is unknown")
            kind = INTERACTIONS[name]
            sizes = {key: value.pop(key) for key in sizes_of(kind) if key in value}
            return cls(**vars(convert(_Shape, value)), interaction=convert(kind, sizes))
        except ValueError as error:
            raise SchemaError(f"not the configuration of a model: {error}") from None


def model_config(settings: TrainSettings, schema: TableSchema) -> ModelConfig:
    """Return the model that ``settings`` ask for on the data that ``schema`` describes.

    Table sizes come from the data unless the settings hold them. A given size that leaves out the
    reserved ids, as published sizes do, is raised to what the data need.

    Raises:
        SettingsError: A given table is too small for the ids in the data, the number of given
            sizes is not the number of categorical columns, or the layers for the dense columns do
            not end with the width of the embeddings.
        SchemaError: The data have too few columns for the interaction.
    """
    return ModelConfig(
        dense=schema.dense,
        categorical=schema.categorical,
        num_embeddings=_table_sizes(settings, schema),
        embedding_dim=settings.embedding_dim,
        dense_arch_layer_sizes=_dense_layers(settings) if schema.dense else (),
        over_arch_layer_sizes=settings.over_arch_layer_sizes,
        first_order=_first_order(settings, len(schema.categorical)),
        interaction=settings.interaction,
    )


def _first_order(settings: TrainSettings, columns: int) -> float:
    """Return the factor of the first-order term; with a rate of their own, users mean a DLRM."""
    if settings.first_order is not None:
        return settings.first_order
    if settings.learning_rate:
        return 0.0
    return min(_FIRST_ORDER, round(_MOST_FIRST_ORDER / max(columns, 1), 3))


def _dense_layers(settings: TrainSettings) -> tuple[int, ...]:
    sizes = settings.dense_arch_layer_sizes
    if sizes[-1] != settings.embedding_dim:
        raise SettingsError(
            f"--dense_arch_layer_sizes {as_text(sizes)} ends with {sizes[-1]}, but "
            f"--embedding_dim is {settings.embedding_dim}",
            "the dense vector is combined with the embeddings: make the two equal",
        )
    return sizes


def _table_sizes(settings: TrainSettings, schema: TableSchema) -> tuple[int, ...]:
    leave_out = "leave the flag out and the sizes come from the data"
    paste = f"or paste --num_embeddings_per_feature {schema.num_embeddings_per_feature}"
    if settings.num_embeddings is not None:
        flag = "--num_embeddings"
        sizes = (settings.num_embeddings,) * len(schema.categorical)
    elif settings.num_embeddings_per_feature is not None:
        flag = "--num_embeddings_per_feature"
        sizes = settings.num_embeddings_per_feature
    else:
        flag, sizes = "", schema.table_sizes
    if len(sizes) != len(schema.categorical):
        raise SettingsError(
            f"{flag} has {len(sizes)} sizes, but the data has {len(schema.categorical)} "
            f"categorical columns ({schema.categorical[0]} … {schema.categorical[-1]})",
            f"{leave_out}, {paste}",
        )
    short = {
        name: (given, needed)
        for name, given, needed in zip(schema.categorical, sizes, schema.table_sizes, strict=True)
        if given < needed and not (settings.hash_indices and given > _RESERVED_IDS)
    }
    small = {
        f"column {name} needs {needed} rows (its largest id + 1) and gets {given}": given
        for name, (given, needed) in short.items()
        if needed - given > _RESERVED_IDS
    }
    if small:
        # smaller tables have no row to map ids to
        hashing = "add --hash_indices, " if min(small.values()) > _RESERVED_IDS else ""
        raise SettingsError(
            f"{flag}: table too small: {'; '.join(small)}", f"{leave_out}, {hashing}{paste}"
        )
    if short:
        raised = (f"{name} {given} → {needed}" for name, (given, needed) in short.items())
        log.info("%s counts values; raised for the reserved ids: %s", flag, ", ".join(raised))
    needed = {name: rows for name, (_, rows) in short.items()}
    sizes = tuple(map(needed.get, schema.categorical, sizes))
    # the loader maps ids beyond it into the table
    limit = settings.max_table_size or max(sizes, default=0)
    return tuple(min(size, limit) for size in sizes)
