"""The head of a model, which follows the lookup: vectors of dense values and those that the data
bring, a linear term, and a module."""

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


class FirstOrder(nn.Module):
    """Logistic regression beside the module: the linear term of the logit.

    It is the wide part of Wide & Deep (Cheng et al. 2016, arXiv:1606.07792) and the linear one of
    DeepFM (Guo et al. 2017, arXiv:1703.04247). The weights of the ids have no tables of their own:
    those for label t are coordinate t of the ids' embeddings, times a factor, and the module does
    not see these coordinates. The vectors of dense values are divided in the same way, and so are
    the results of the layers of the data's vectors; a dense feature has one more weight, for the
    value itself.

    Attributes:
        weight: The weights of the dense features, [T, their number]; None without any.
        bias: The biases, [T].

    Args:
        factor: ``ModelConfig.first_order``. It scales the steps of the ids' weights.
        dense: The number of dense features.
        dim: The width of the embeddings, D.
        labels: The number of labels, T.
        scale: The factor of the other coordinates, ``ModelConfig.vector_scale``.
        coordinates: The coordinate at which the weights of each feature begin; of vectors of
            dense values, and of the data's vectors, it is 0.
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
        #: Runs of neighbouring features whose weights begin at the same coordinate: the number of
        #: features, and the coordinate.
        self.runs = []
        for coordinate, features in itertools.groupby(coordinates):
            self.runs.append((len(list(features)), coordinate))
        self.factor, self.labels = factor, labels
        self.weight = nn.Parameter(torch.zeros(labels, dense)) if dense else None
        self.bias = nn.Parameter(torch.zeros(labels))
        others = torch.full((dim,), scale)
        others[: max(coordinates, default=0) + labels] = 0
        self.register_buffer("others", others, persistent=False)

    def forward(
        self, dense: torch.Tensor, vectors: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the term [B, T], and the vectors [B, V, D] with 0 in the coordinates it takes."""
        return self.compute_term(dense, self.sum_weights(vectors)), vectors * self.others

    def sum_weights(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return the sums of the weights that are coordinates of the vectors, [B, T]."""
        if len(self.runs) > 1:
            counts = [count for count, _ in self.runs]
            # Vectors of dense values, and the data's own, follow those of the features; their
            # weights begin at 0.
            num_others = vectors.shape[1] - sum(counts)
            parts = vectors.split([*counts, num_others], 1)
            coordinates = [coordinate for _, coordinate in self.runs] + [0]
            weights = []
            for part, coordinate in zip(parts, coordinates, strict=True):
                weights.append(part.narrow(2, coordinate, self.labels))
            return torch.cat(weights, 1).sum(1)
        return vectors.narrow(2, 0, self.labels).sum(1)

    def compute_term(self, dense: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
        """Return the term [B, T] of dense values [B, N] and the sums of the other weights."""
        term = torch.add(self.bias, sums, alpha=self.factor)
        if self.weight is not None:
            # Not a matrix product, which autocast would round to bfloat16.
            term = term + (dense.unsqueeze(1) * self.weight).sum(2)
        return term

    def list_coordinates(self, num_vectors: int) -> list[int]:
        """Return the coordinate at which the weights of each of ``num_vectors`` vectors begin."""
        coordinates = []
        for count, coordinate in self.runs:
            coordinates += [coordinate] * count
        return coordinates + [0] * (num_vectors - len(coordinates))


class Head(nn.Module):
    """The logits of dense values and embeddings.

    Attributes:
        piecewise: The vectors of dense values, or None.
        first_order: The linear term, or None.
        module: The module of the contract (:mod:`.contract`).
        labels: The number of labels, T.
        raw_columns: The columns whose ids and lengths the module takes.
        dense_vectors: The layers of the data's vectors, or None.
        vector_join: Joins the vectors for the module where :meth:`join_on_gpu` was called; None if
            the module gets them joined.

    Args:
        factors: The factor of each vector before the module gets it, [V, 1]; None if all are 1.
        given: Where the inputs of the vectors that the module takes as they are begin and end, in
            the order of its ``vector_columns``.
    """

    factors: torch.Tensor | None

    def __init__(
        self,
        piecewise: PiecewiseLinear | None,
        first_order: FirstOrder | None,
        module: nn.Module,
        labels: int,
        factors: torch.Tensor | None,
        dense_vectors: DenseVectors | None = None,
        given: Sequence[tuple[int, int]] = (),
    ) -> None:
        super().__init__()
        self.piecewise, self.first_order = piecewise, first_order
        self.module, self.labels = module, labels
        self.dense_vectors, self._given = dense_vectors, given
        self.raw_columns = find_raw_columns(module)
        self.register_buffer("factors", factors, persistent=False)
        self.vector_join: VectorJoin | None = None
        self._coordinates: torch.Tensor | None = None

    def join_on_gpu(self) -> None:
        """Give the module its vectors in parts, which a kernel joins, if it can take them so."""
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
        """Return the logits of some rows.

        Args:
            dense: The dense values [B, N].
            vectors: The embeddings [B, F, D].
            more: The inputs ``ids``, ``lengths``, ``lists`` and ``present`` that the module takes.
            dense_vectors: The vectors of the data [B, all inputs], each followed by its indicator;
                None if the data have none.
            feature_sums: The sums of the features' weights of the linear term, float32 [B, T], if
                ``vectors`` are rounded; only with ``vector_join``.

        Returns:
            The logits [B, T].

        Raises:
            ValueError: The model takes vectors, and none are given.
        """
        more = more or {}
        parts = [vectors]
        if self.piecewise is not None:
            parts.append(self.piecewise(dense))
        if self.dense_vectors is not None:
            if dense_vectors is None:
                raise ValueError("the model takes dense_vectors, and none are given")
            parts.append(self.dense_vectors(dense_vectors))
            if self._given:
                more = {**more, "dense_vectors": take_inputs(dense_vectors, self._given)}
        if self.vector_join is not None:
            return self._compute_of_parts(dense, vectors, parts[1:], feature_sums)
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

    def _compute_of_parts(
        self,
        dense: torch.Tensor,
        vectors: torch.Tensor,
        parts: Sequence[torch.Tensor],
        feature_sums: torch.Tensor | None,
    ) -> torch.Tensor:
        """Compute :meth:`forward`, with the vectors of features and the other vectors apart."""
        assert self.vector_join is not None
        others = None
        if parts:
            others = torch.cat([*parts], 1) if len(parts) > 1 else parts[0]
        factors, sums = None, vectors.new_empty((len(vectors), 0), dtype=torch.float32)
        if self.first_order is not None:
            factors = self.first_order.others
            with torch.no_grad():  # joining gives the sums their gradient
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
    """Build the head of a model, with its initial weights, which depend on the seed alone.

    Args:
        config: The model.
        seed: The seed of the initial weights.
        device: The device of the head. Initial weights are made on the CPU, so that they are the
            same on all devices; with "meta" nothing is allocated.
        build: Builds the module of an own model.

    Raises:
        SchemaError: The settings do not make the model, or it is an own one without ``build``.
    """
    initial_device = "meta" if torch.device(device).type == "meta" else "cpu"
    with torch.random.fork_rng(devices=[]), torch.device(initial_device):
        torch.manual_seed(seed)
        module = _build_own(config, build) if build else _build_known(config)
        labels, dim = len(config.labels), config.embedding_dim
        first_order = piecewise = None
        if config.first_order:
            first_order = FirstOrder(
                config.first_order,
                dense=len(config.dense),
                dim=dim,
                labels=labels,
                scale=config.vector_scale,
                coordinates=[*config.first_order_coordinates.values()],
            )
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
        given = locate_vectors(config, find_vector_columns(module))
        head = Head(piecewise, first_order, module, labels, factors, dense_vectors, given)
    return head.to(device)


def _scale_histories(config: ModelConfig, piecewise: PiecewiseLinear | None) -> torch.Tensor:
    """Return the factor of each vector, [V, 1]: √max_events of histories, 1 of others.

    The vector of a history is a mean of up to ``max_events`` embeddings: of independent ones it is
    smaller than an embedding by about this factor.
    """
    num_vectors = len(config.features)
    if piecewise is not None:
        num_vectors += 1 if piecewise.summed else len(config.dense)
    num_vectors += len(config.dense_vectors)
    factors = torch.ones(num_vectors, 1)
    factors[len(config.categorical) : len(config.features)] = math.sqrt(config.max_events)
    return factors


def build_without_values(config: ModelConfig) -> Head:
    """Build the head of a model of this project on the CPU, for weights that are loaded next.

    Parameters get no initial values, which would take time. The device "meta" would save that time
    as well, but PyTorch imports its compiler for it: a second, and 70 MB of each server's process.

    Raises:
        SchemaError: The settings do not make a model, or make one too large for this machine.
    """
    try:
        with _SkipInitialization():
            return build_head(config)
    except (RuntimeError, MemoryError) as error:  # raised by PyTorch's allocator
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise SchemaError(f"not the configuration of a model: {reason:.200}") from None


class _SkipInitialization(TorchFunctionMode):
    """Leave out ``torch.nn.init`` and the random numbers that it draws."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        is_initializer = getattr(function, "__module__", "") == "torch.nn.init"
        if is_initializer or getattr(function, "__name__", "") in ("uniform_", "normal_"):
            return args[0] if args else kwargs["tensor"]
        return function(*args, **(kwargs or {}))


def _build_own(config: ModelConfig, build: Build) -> nn.Module:
    """Return the module of an own model.

    Raises:
        SettingsError: ``build`` is a module, not a function that makes one.
        TypeError: It returns something else, or a ScriptModule.
    """
    if isinstance(build, nn.Module):
        raise SettingsError(
            f"{type(build).__name__}: a module was given, not the function that makes it",
            "give a function build(columns, **settings) that returns the module",
        )
    module = build(config.columns, **config.settings)
    if not isinstance(module, nn.Module):
        raise TypeError(f"{config.model} returns {type(module).__name__}, not a module")
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(f"{config.model} returns a ScriptModule: return the module that it scripts")
    return module


def _build_known(config: ModelConfig) -> nn.Module:
    """Return the module of a model of this project. Raises SchemaError."""
    if config.own:
        raise SchemaError(
            f"the model is {config.model}, whose code is not imported because a file names it",
            f"name it, if you trust it: --model {config.model}, or in Python model=FUNCTION",
        )
    try:
        if config.model not in MODELS:
            raise ValueError(f"no model is called {config.model!r:.80}")
        return load_model(config.model).build(config.columns, **config.settings)
    except (TypeError, ValueError) as error:
        raise SchemaError(f"not the configuration of a model: {error}") from None


def widest_layer(config: ModelConfig) -> int:
    """Return the width of the widest layer of a model."""
    if config.own:
        return config.own.widest
    with torch.device("meta"):
        return find_widest(_build_known(config))


def find_widest(module: nn.Module, looked_up: Container[str] = ()) -> int:
    """Return the width of the widest layer: the module's ``widest``, or the rows of its largest
    matrix.

    Parameters named in ``looked_up`` are tables that are looked up by ids, not layers.
    """
    widest = getattr(module, "widest", None)
    if widest:
        return widest
    widths = [1]
    for name, weight in module.named_parameters():
        if weight.dim() > 1 and name not in looked_up:
            widths.append(len(weight))
    return max(widths)
