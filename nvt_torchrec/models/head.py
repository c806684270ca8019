"""The head of a model, which follows the lookup of embeddings.

It consists of the vectors of dense values, the layers of the data's vectors, the linear term, and
the module (:mod:`.contract`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from nvt_torchrec.base.errors import SchemaError, SettingsError
from nvt_torchrec.models.config import ModelConfig
from nvt_torchrec.models.contract import Build, find_raw_columns, find_vector_columns
from nvt_torchrec.models.dense_vectors import DenseVectors, locate_vectors, take_inputs
from nvt_torchrec.models.piecewise import PiecewiseLinear
from nvt_torchrec.models.registry import MODELS, load_model
from nvt_torchrec.models.vector_join import UnjoinedVectors, VectorJoin


class LinearTerm(nn.Module):
    """The linear term of the logit: a logistic regression, which is added to the module's result.

    It is the wide part of Wide & Deep (Cheng et al. 2016, arXiv:1606.07792) and the linear part of
    DeepFM (Guo et al. 2017, arXiv:1703.04247). The weights of the ids have no separate tables: the
    weight for label t is coordinate t of the id's embedding, times a factor, and the module gets 0
    in these coordinates. The vectors of dense values and the results of the layers of the data's
    vectors are divided in the same way. In addition, the value of each dense feature has a weight.

    Attributes:
        weight: The weights of the dense features [T, dense features]; None without dense features.
        bias: The biases [T].
        others: The factor of each coordinate before the module gets it, [D]: 0 for the coordinates
            of the linear term, ``scale`` for all others.

    Args:
        factor: ``ModelConfig.first_order``. It scales the update steps of the ids' weights.
        dense: The number of dense features.
        dim: The width of the embeddings, D.
        labels: The number of labels, T.
        scale: ``ModelConfig.vector_scale``, the factor of the other coordinates.
        coordinates: The first coordinate of the weights of each feature. It is 0 for vectors of
            dense values and for the data's vectors.
    """

    others: torch.Tensor

    def __init__(
        self,
        factor: float,
        dense: int,
        dim: int,
        labels: int,
        scale: float,
        coordinates: Sequence[int] = (),
    ) -> None:
        super().__init__()
        #: Runs of adjacent features whose weights begin at the same coordinate: the number of
        #: features and the coordinate.
        self.runs = []
        for coordinate, features in itertools.groupby(coordinates):
            self.runs.append((len(list(features)), coordinate))
        self.factor = factor
        self.labels = labels
        self.weight = nn.Parameter(torch.zeros(labels, dense)) if dense else None
        self.bias = nn.Parameter(torch.zeros(labels))
        others = torch.full((dim,), scale)
        others[: max(coordinates, default=0) + labels] = 0
        self.register_buffer("others", others, persistent=False)

    def forward(
        self, dense: torch.Tensor, vectors: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the term [B, T], and the vectors [B, V, D] for the module.

        Args:
            dense: The dense values [B, N].
            vectors: The vectors [B, V, D].
        """
        return self.compute_term(dense, self.sum_weights(vectors)), vectors * self.others

    def sum_weights(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return the sums [B, T] of the weights in the coordinates of the vectors [B, V, D]."""
        if len(self.runs) > 1:
            counts = [count for count, _ in self.runs]
            # The vectors of dense values and the data's vectors follow those of the features. Their
            # weights begin at coordinate 0.
            num_others = vectors.shape[1] - sum(counts)
            parts = vectors.split([*counts, num_others], 1)
            coordinates = [coordinate for _, coordinate in self.runs] + [0]
            weights = []
            for part, coordinate in zip(parts, coordinates, strict=True):
                weights.append(part.narrow(2, coordinate, self.labels))
            return torch.cat(weights, 1).sum(1)
        return vectors.narrow(2, 0, self.labels).sum(1)

    def compute_term(self, dense: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
        """Return the term [B, T] for dense values [B, N] and the result of :meth:`sum_weights`."""
        term = torch.add(self.bias, sums, alpha=self.factor)
        if self.weight is not None:
            # A sum instead of a matrix product, which autocast would round to bfloat16.
            term = term + (dense.unsqueeze(1) * self.weight).sum(2)
        return term

    def list_coordinates(self, num_vectors: int) -> list[int]:
        """Return the first coordinate of the weights of each of ``num_vectors`` vectors."""
        coordinates = []
        for count, coordinate in self.runs:
            coordinates += [coordinate] * count
        return coordinates + [0] * (num_vectors - len(coordinates))


class Head(nn.Module):
    """The part of a model that computes logits from dense values and embeddings.

    Attributes:
        piecewise: Computes the vectors of dense values; None if they have none.
        first_order: The linear term; None if it is turned off.
        module: The module (:mod:`.contract`).
        labels: The number of labels, T.
        raw_columns: The columns whose ids and lengths the module takes.
        dense_vectors: The layers of the data's vectors; None if the data have none.
        vector_join: Joins the vectors inside the module, after :meth:`join_on_gpu`; None if the
            module gets joined vectors.

    Args:
        factors: The factor [V, 1] of each vector before the module gets it; None if all are 1.
        raw_vector_bounds: The ranges of the inputs of the vectors that the module takes unchanged,
            in the order of its ``vector_columns``.
    """

    factors: torch.Tensor | None

    def __init__(
        self,
        piecewise: PiecewiseLinear | None,
        first_order: LinearTerm | None,
        module: nn.Module,
        labels: int,
        factors: torch.Tensor | None,
        dense_vectors: DenseVectors | None = None,
        raw_vector_bounds: Sequence[tuple[int, int]] = (),
    ) -> None:
        super().__init__()
        self.piecewise = piecewise
        self.first_order = first_order
        self.module = module
        self.labels = labels
        self.dense_vectors = dense_vectors
        self._raw_vector_bounds = raw_vector_bounds
        self.raw_columns = find_raw_columns(module)
        self.register_buffer("factors", factors, persistent=False)
        self.vector_join: VectorJoin | None = None
        self._coordinates: torch.Tensor | None = None

    def join_on_gpu(self) -> None:
        """Pass the module its vectors in parts, which a kernel joins, if it supports that."""
        if self.factors is None and getattr(self.module, "joins_vectors", False):
            self.vector_join = VectorJoin()

    def forward(
        self,
        dense: torch.Tensor,
        vectors: torch.Tensor,
        more: Mapping[str, torch.Tensor] | None = None,
        dense_vectors: torch.Tensor | None = None,
        feature_sums: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the logits of rows.

        Args:
            dense: The dense values [B, N].
            vectors: The embeddings [B, F, D].
            more: The arguments ``ids``, ``lengths``, ``lists`` and ``present`` that the module
                takes.
            dense_vectors: The vectors of the data [B, all inputs], each followed by its indicator;
                None if the data have none.
            feature_sums: The sums of the features' weights in the linear term, float32 [B, T], if
                ``vectors`` are rounded. Only used with ``vector_join``.

        Returns:
            The logits [B, T].

        Raises:
            ValueError: The model takes vectors of the data, but ``dense_vectors`` is None.
        """
        more = more or {}
        parts = [vectors]
        if self.piecewise is not None:
            parts.append(self.piecewise(dense))
        if self.dense_vectors is not None:
            if dense_vectors is None:
                raise ValueError("the model takes dense_vectors, but none are given")
            parts.append(self.dense_vectors(dense_vectors))
            if self._raw_vector_bounds:
                raw_vectors = take_inputs(dense_vectors, self._raw_vector_bounds)
                more = {**more, "dense_vectors": raw_vectors}
        if self.vector_join is not None:
            return self._compute_from_parts(dense, vectors, parts[1:], feature_sums)
        if len(parts) > 1:
            vectors = torch.cat(parts, 1)
        term = None
        if self.first_order is not None:
            term, vectors = self.first_order(dense, vectors)
            if "lists" in more:
                more = {**more, "lists": more["lists"] * self.first_order.others}
        if self.factors is not None:
            vectors = vectors * self.factors
        logits = self.module(dense, vectors, **more).reshape(-1, self.labels)
        return logits if term is None else logits + term

    def _compute_from_parts(
        self,
        dense: torch.Tensor,
        vectors: torch.Tensor,
        parts: Sequence[torch.Tensor],
        feature_sums: torch.Tensor | None,
    ) -> torch.Tensor:
        """Compute :meth:`forward` without joining the vectors of features and the other vectors.

        Args:
            dense: The dense values [B, N].
            vectors: The embeddings [B, F, D].
            parts: The other vectors, each float32 [B, its number of vectors, D].
            feature_sums: As in :meth:`forward`.
        """
        assert self.vector_join is not None
        others = None
        if parts:
            others = torch.cat([*parts], 1) if len(parts) > 1 else parts[0]
        factors = None
        sums = vectors.new_empty((len(vectors), 0), dtype=torch.float32)
        if self.first_order is not None:
            factors = self.first_order.others
            with torch.no_grad():  # the join computes the gradient of the sums
                if feature_sums is None:
                    feature_sums = self.first_order.sum_weights(vectors)
                sums = feature_sums
                if others is not None:
                    sums = sums + others.narrow(2, 0, self.labels).sum(1)
        if self._coordinates is None:
            num_vectors = vectors.shape[1] + (0 if others is None else others.shape[1])
            coordinates = [0] * num_vectors
            if self.first_order is not None:
                coordinates = self.first_order.list_coordinates(num_vectors)
            self._coordinates = torch.tensor(coordinates, dtype=torch.int32, device=vectors.device)
        unjoined = UnjoinedVectors(
            self.vector_join, vectors, others, sums, factors, self._coordinates
        )
        logits = self.module(dense, unjoined).reshape(-1, self.labels)
        if self.first_order is None:
            return logits
        return logits + self.first_order.compute_term(dense, unjoined.sums)


def build_head(
    config: ModelConfig,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    build: Build | None = None,
) -> Head:
    """Build the head of a model with its initial weights, which depend only on the seed.

    Args:
        config: The model.
        seed: The seed of the initial weights.
        device: The device of the head. Initial weights are drawn on the CPU, so that they are the
            same on all devices. On the device "meta" nothing is allocated.
        build: Builds the module of a custom model.

    Raises:
        SchemaError: The settings are invalid, or the model is a custom one and ``build`` is None.
    """
    initial_device = "meta" if torch.device(device).type == "meta" else "cpu"
    with torch.random.fork_rng(devices=[]), torch.device(initial_device):
        torch.manual_seed(seed)
        module = _build_own(config, build) if build else _build_known(config)
        labels = len(config.labels)
        dim = config.embedding_dim
        first_order = None
        if config.first_order:
            first_order = LinearTerm(
                config.first_order,
                dense=len(config.dense),
                dim=dim,
                labels=labels,
                scale=config.vector_scale,
                coordinates=[*config.first_order_coordinates.values()],
            )
        piecewise = None
        if config.dense_bins and config.dense:
            weights = labels if config.first_order else 0
            summed = getattr(module, "sums_dense", False)
            piecewise = PiecewiseLinear(
                len(config.dense), config.dense_bins, dim, weights, summed=summed
            )
        dense_vectors = None
        if config.dense_vectors:
            weights = labels if config.first_order else 0
            dense_vectors = DenseVectors([*config.vector_bounds.values()], dim, weights)
        factors = _scale_histories(config, piecewise) if config.histories else None
        raw_vector_bounds = locate_vectors(config, find_vector_columns(module))
        head = Head(
            piecewise, first_order, module, labels, factors, dense_vectors, raw_vector_bounds
        )
    return head.to(device)


def _scale_histories(config: ModelConfig, piecewise: PiecewiseLinear | None) -> torch.Tensor:
    """Return the factor of each vector, [V, 1]: √max_events for histories, 1 for all others.

    The vector of a history is the mean of up to ``max_events`` embeddings. If they are independent,
    the mean is smaller than an embedding by about this factor.
    """
    num_vectors = len(config.features)
    if piecewise is not None:
        num_vectors += 1 if piecewise.summed else len(config.dense)
    num_vectors += len(config.dense_vectors)
    factors = torch.ones(num_vectors, 1)
    factors[len(config.categorical) : len(config.features)] = math.sqrt(config.max_events)
    return factors


def build_uninitialized_head(config: ModelConfig) -> Head:
    """Build the head of a model of this project on the CPU, without initial values.

    The caller loads the weights, so drawing initial values would waste time. The device "meta"
    would avoid that, too, but it makes PyTorch import its compiler, which takes a second and 70 MB
    of each server process.

    Raises:
        SchemaError: The settings are invalid, or the model is too large for this machine.
    """
    try:
        with _SkipInitialization():
            return build_head(config)
    except (RuntimeError, MemoryError) as error:  # raised by PyTorch's allocator
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise SchemaError(f"not the configuration of a model: {reason:.200}") from None


class _SkipInitialization(TorchFunctionMode):
    """Skips calls of ``torch.nn.init`` and the random numbers that it draws."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        is_initializer = getattr(function, "__module__", "") == "torch.nn.init"
        if is_initializer or getattr(function, "__name__", "") in ("uniform_", "normal_"):
            return args[0] if args else kwargs["tensor"]
        return function(*args, **(kwargs or {}))


def _build_own(config: ModelConfig, build: Build) -> nn.Module:
    """Build the module of a custom model.

    Raises:
        SettingsError: ``build`` is a module instead of a function that returns one.
        TypeError: ``build`` does not return a module, or returns a ScriptModule.
    """
    if isinstance(build, nn.Module):
        raise SettingsError(
            f"{type(build).__name__} is a module, not a function that returns one",
            "give a function build(columns, **settings) that returns the module",
        )
    module = build(config.columns, **config.settings)
    if not isinstance(module, nn.Module):
        raise TypeError(f"{config.model} returns {type(module).__name__}, not a module")
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(
            f"{config.model} returns a ScriptModule: return the module without scripting"
        )
    return module


def _build_known(config: ModelConfig) -> nn.Module:
    """Build the module of a model of this project.

    Raises:
        SchemaError: The model is a custom one or unknown, or its settings are invalid.
    """
    if config.own:
        raise SchemaError(
            f"the model is {config.model}, and code is not imported only because a file names it",
            f"if you trust it, name it with --model {config.model}, or in Python model=FUNCTION",
        )
    try:
        if config.model not in MODELS:
            raise ValueError(f"no model is called {config.model!r:.80}")
        return load_model(config.model).build(config.columns, **config.settings)
    except (TypeError, ValueError) as error:
        raise SchemaError(f"not the configuration of a model: {error}") from None


def find_widest_layer(config: ModelConfig) -> int:
    """Return the width of the widest layer of a model."""
    if config.own:
        return config.own.widest
    with torch.device("meta"):
        return find_widest(_build_known(config))


def find_widest(module: nn.Module, looked_up: Container[str] = ()) -> int:
    """Return the width of a module's widest layer.

    It is the module's attribute ``widest`` or, without it, the number of rows of its largest
    matrix.

    Args:
        module: The module.
        looked_up: The names of parameters that are tables, which are looked up by ids, not layers.
    """
    widest = getattr(module, "widest", None)
    if widest:
        return widest
    widths = [1]
    for name, weight in module.named_parameters():
        if weight.dim() > 1 and name not in looked_up:
            widths.append(len(weight))
    return max(widths)
