"""The shape of the model, from settings and data or from a checkpoint."""

from __future__ import annotations

import dataclasses
from typing import Any

from nvt_torchrec.base.command_line import as_text
from nvt_torchrec.base.errors import SchemaError, SettingsError
from nvt_torchrec.base.files.validation import convert
from nvt_torchrec.dlrm.settings.fields import INTERACTIONS
from nvt_torchrec.dlrm.settings.train_settings import TrainSettings
from nvt_torchrec.formats.schema import LARGEST_TABLE, TableSchema

#: The sizes that each interaction has; those of the others are 0 or empty.
INTERACTION_SIZES = {
    "original": (),
    "dcn": ("dcn_num_layers", "dcn_low_rank_dim"),
    "projection": ("interaction_branch1_layer_sizes", "interaction_branch2_layer_sizes"),
}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
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
        interaction_type: How dense features and embeddings are combined: "original" (dot products
            of all pairs, Naumov et al. 2019), "dcn" (low-rank cross network, Wang et al. 2020) or
            "projection" (products of two projections).
        dcn_num_layers: The layers of the cross network; 0 without one.
        dcn_low_rank_dim: The rank of its weights; 0 without one.
        interaction_branch1_layer_sizes: The layers of the first projection; empty without one.
        interaction_branch2_layer_sizes: The layers of the second projection; empty without one.
        multi_hot_sizes: The ids per row that are made from the one id of each categorical feature
            (:mod:`dlrm.multi_hot`). Empty: the ids are those of the data.
        multi_hot_distribution_type: The distribution of those ids.

    Raises:
        SchemaError: The values do not make a DLRM.
    """

    dense: tuple[str, ...]
    categorical: tuple[str, ...]
    num_embeddings: tuple[int, ...]
    embedding_dim: int
    dense_arch_layer_sizes: tuple[int, ...]
    over_arch_layer_sizes: tuple[int, ...]
    interaction_type: str = "original"
    dcn_num_layers: int = 0
    dcn_low_rank_dim: int = 0
    interaction_branch1_layer_sizes: tuple[int, ...] = ()
    interaction_branch2_layer_sizes: tuple[int, ...] = ()
    multi_hot_sizes: tuple[int, ...] = ()
    multi_hot_distribution_type: str = "uniform"

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
        if self.interaction_type not in INTERACTIONS:
            raise SchemaError(f"no DLRM has interaction_type {self.interaction_type!r}")
        for name in (field.name for field in dataclasses.fields(self)):
            sizes = getattr(self, name)
            for size in sizes if isinstance(sizes, tuple) else (sizes,):
                least = 0 if name.startswith("dcn_") else 1
                if isinstance(size, int) and not least <= size <= LARGEST_TABLE:
                    raise SchemaError(f"no DLRM has a size of {size} in {name}")
        if len(self.categorical) + bool(self.dense) < 2 and self.interaction_type == "original":
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
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, value: Any) -> ModelConfig:
        """Read what :meth:`to_dict` returned.

        Raises:
            SchemaError: A key is missing or unknown, or its value is of another type.
        """
        try:
            return convert(cls, value)
        except ValueError as error:
            raise SchemaError(f"not the configuration of a model: {error}") from None


def model_config(settings: TrainSettings, schema: TableSchema) -> ModelConfig:
    """Return the model that ``settings`` ask for on the data that ``schema`` describes.

    Table sizes come from the data unless the settings hold them.

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
        interaction_type=settings.interaction_type,
        **{name: getattr(settings, name) for name in INTERACTION_SIZES[settings.interaction_type]},
        **_multi_hot(settings, schema),
    )


def _dense_layers(settings: TrainSettings) -> tuple[int, ...]:
    sizes = settings.dense_arch_layer_sizes
    if sizes[-1] != settings.embedding_dim:
        raise SettingsError(
            f"--dense_arch_layer_sizes {as_text(sizes)} ends with {sizes[-1]}, but "
            f"--embedding_dim is {settings.embedding_dim}",
            "the dense vector is combined with the embeddings: make the two equal",
        )
    return sizes


def _multi_hot(settings: TrainSettings, schema: TableSchema) -> dict[str, Any]:
    sizes = settings.multi_hot_sizes
    if sizes is None:
        return {}
    if schema.multi_hot:
        raise SettingsError(
            f"--multi_hot_sizes, but column {schema.multi_hot[0]} of the data holds lists of ids",
            "leave the flag out: the lists are trained on as they are",
        )
    if len(sizes) != len(schema.categorical):
        raise SettingsError(
            f"--multi_hot_sizes has {len(sizes)} sizes, but the data has "
            f"{len(schema.categorical)} categorical columns",
            "give a size for each column",
        )
    return {
        "multi_hot_sizes": sizes,
        "multi_hot_distribution_type": settings.multi_hot_distribution_type or "uniform",
    }


def _table_sizes(settings: TrainSettings, schema: TableSchema) -> tuple[int, ...]:
    paste = (
        "leave the flag out and the sizes come from the data, add --hash_indices, or paste "
        f"--num_embeddings_per_feature {schema.num_embeddings_per_feature}"
    )
    if settings.num_embeddings is not None:
        flag = "--num_embeddings"
        sizes = (settings.num_embeddings,) * len(schema.categorical)
    elif settings.num_embeddings_per_feature is not None:
        flag = "--num_embeddings_per_feature"
        sizes = settings.num_embeddings_per_feature
    else:
        return _limited(schema.table_sizes, settings)
    if len(sizes) != len(schema.categorical):
        raise SettingsError(
            f"{flag} has {len(sizes)} sizes, but the data has {len(schema.categorical)} "
            f"categorical columns ({schema.categorical[0]} … {schema.categorical[-1]})",
            paste,
        )
    small = [
        f"column {name} needs {needed} rows (its largest id + 1) and gets {given}"
        for name, given, needed in zip(schema.categorical, sizes, schema.table_sizes, strict=True)
        if given < needed
    ]
    if small and not settings.hash_indices:
        raise SettingsError(f"{flag}: table too small: {'; '.join(small)}", paste)
    return _limited(sizes, settings)


def _limited(sizes: tuple[int, ...], settings: TrainSettings) -> tuple[int, ...]:
    """Limit the sizes to ``max_table_size``; the loader maps ids beyond it into the table."""
    limit = settings.max_table_size
    return sizes if limit is None else tuple(min(size, limit) for size in sizes)
