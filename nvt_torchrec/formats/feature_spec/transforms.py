"""The transforms of dense columns: one class each, in a registry by the name in the spec.

Missing values are filled first. A raw value x then becomes y = f(x), and if the transform is
normalized, z = (y − mean) / std. Mean and standard deviation (n − 1 in the denominator) are
computed in float64 over the y of the training rows. :mod:`workflows.nodes` derives NVTabular's
operators from the attributes; f is written once, for arrays of NumPy, CuPy and PyTorch.

To add a transform, add a class and its line in :data:`TRANSFORMS`; a new f also needs a function in
:mod:`workflows.functions`.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

#: Added before the logarithm of ``log_normalize`` and ``log``.
LOG_SHIFT = 3


class DenseTransform:
    """A transform of dense columns. The base class is ``normalize``, for which f(x) = x.

    Attributes:
        name: Its name in the spec.
        normalized: Whether the result is z, which needs mean and standard deviation.
        function: The name of the function in :mod:`workflows.functions` that computes f for x of at
            least ``minimum``; "" if f(x) = x. Transforms with the same function have the same f.
        minimum: Smaller x are replaced by this bound. The results for integers from the bound on
            are looked up in a table. None if f(x) = x.
        y_formula: The formula of f, for reports.
    """

    name = "normalize"
    normalized = True
    function = ""
    minimum: int | None = None
    y_formula = "x"

    @property
    def formula(self) -> str:
        """The formula of the result, for reports."""
        return f"({self.y_formula} - mean) / std" if self.normalized else self.y_formula

    def apply(self, x: Any, arrays: ModuleType) -> Any:
        """Return y = f(x).

        Args:
            x: An array or tensor of float64, without missing values.
            arrays: The module that x belongs to: NumPy, CuPy or PyTorch.
        """
        return x

    def invert(self, y: Any, arrays: ModuleType) -> Any:
        """Return the x with f(x) = y; every x below the minimum is returned as the minimum."""
        return y


class LogNormalize(DenseTransform):
    """The logarithm, normalized.

    Only a few values of Criteo's log are below the bound −2. Without the bound the logarithm of
    x ≤ −3 would be −inf or NaN, and normalizing would turn the whole column into NaN.

    Attributes:
        shift: The number that is added before the logarithm.
    """

    name = "log_normalize"
    function = "log_of_shifted"
    minimum = -2
    shift = LOG_SHIFT
    y_formula = "log(max(x, -2) + 3)"

    def apply(self, x: Any, arrays: ModuleType) -> Any:
        """Return y, see :meth:`DenseTransform.apply`."""
        return arrays.log(x.clip(min=self.minimum) + self.shift)

    def invert(self, y: Any, arrays: ModuleType) -> Any:
        """Return x, see :meth:`DenseTransform.invert`."""
        return arrays.exp(y) - self.shift


class Log(LogNormalize):
    """The logarithm, not normalized, as in TorchRec's NVTabular script (FillMissing, +2, LogOp)."""

    name = "log"
    normalized = False


class LogPlus2(Log):
    """The logarithm of x + 2, as NVIDIA's DLRM describes it; its argument is at least 1."""

    name = "log_plus_2"
    function = "log_of_plus_2"
    minimum = -1
    shift = 2
    y_formula = "log(max(x, -1) + 2)"


class Log1pNormalize(LogNormalize):
    """log(1 + x), normalized, for values that are never negative, such as durations."""

    name = "log1p_normalize"
    function = "log_of_plus_1"
    minimum = 0
    shift = 1
    y_formula = "log(max(x, 0) + 1)"


TRANSFORMS: dict[str, DenseTransform] = {
    transform.name: transform
    for transform in (LogNormalize(), Log(), LogPlus2(), Log1pNormalize(), DenseTransform())
}
