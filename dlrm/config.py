"""The shape of the model: what has to be known to build it, from settings, data or a checkpoint."""

from __future__ import annotations

import dataclasses
from typing import Any

from clicklog.errors import SchemaError, SettingsError
from clicklog.schema import TableSchema
from dlrm.settings import TrainSettings


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The shape of a DLRM.

    Attributes:
        dense: names of the dense features, in the order of the columns of ``dense_features``.
        categorical: names of the categorical features: the keys of the KeyedJaggedTensor.
        num_embeddings: rows of each feature's table.
        embedding_dim: width of all tables.
        dense_arch_layer_sizes: layers for the dense features; the last is ``embedding_dim``.
        over_arch_layer_sizes: two or more layers above the interaction; the last is 1.

    Raises:
        SchemaError: these do not make a DLRM.
    """

    dense: tuple[str, ...]
    categorical: tuple[str, ...]
    num_embeddings: tuple[int, ...]
    embedding_dim: int
    dense_arch_layer_sizes: tuple[int, ...]
    over_arch_layer_sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        over, dense = self.over_arch_layer_sizes, self.dense_arch_layer_sizes
        if len(self.categorical) != len(self.num_embeddings):
            raise SchemaError(
                f"{len(self.categorical)} categorical features, "
                f"{len(self.num_embeddings)} table sizes"
            )
        if dense[-1:] != (self.embedding_dim,) or len(over) < 2 or over[-1] != 1:
            raise SchemaError(
                f"no DLRM has embedding_dim {self.embedding_dim}, dense_arch_layer_sizes {dense} "
                f"and over_arch_layer_sizes {over}"
            )

    @property
    def table_names(self) -> list[str]:
        """The tables' names, ``t_<feature>`` as in TorchRec's examples."""
        return [f"t_{name}" for name in self.categorical]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form; :meth:`from_dict` reads it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, value: Any) -> ModelConfig:
        """Inverse of :meth:`to_dict`.

        Raises:
            SchemaError: keys are missing, unknown or hold something else.
        """
        try:
            config = cls(
                **{
                    key: tuple(item) if isinstance(item, list) else item
                    for key, item in value.items()
                }
            )
        except (AttributeError, TypeError) as error:
            raise SchemaError(f"not the configuration of a model: {error}") from None
        return config


def model_config(settings: TrainSettings, schema: TableSchema) -> ModelConfig:
    """The model that ``settings`` ask for on the data that ``schema`` describes.

    Table sizes come from the data unless they were given.

    Raises:
        SettingsError: a given table is too small for the ids in the data, or the number of given
            sizes is not the number of categorical columns.
        SchemaError: the data has no dense column.
    """
    if not schema.dense:
        raise SchemaError(
            f"{settings.binary_path}: the data has no dense column", "DLRM needs at least one"
        )
    return ModelConfig(
        dense=schema.dense,
        categorical=schema.categorical,
        num_embeddings=_table_sizes(settings, schema),
        embedding_dim=settings.embedding_dim,
        dense_arch_layer_sizes=settings.dense_arch_layer_sizes,
        over_arch_layer_sizes=settings.over_arch_layer_sizes,
    )


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
        return schema.table_sizes
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
    return sizes
