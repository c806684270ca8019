"""The transforms of dense columns: one class each, in a registry by the name in the spec.

The result is z = (y − mean) / std, or y alone, of a value y = f(x) of the raw value x, missing
values filled first. Mean and standard deviation (n − 1 in the denominator) are those of y on the
training days, in float64. NVTabular's operators follow from the attributes
(:mod:`workflows.nodes`), and f is one expression for the arrays of NumPy, CuPy and PyTorch.

To add a transform, add a class and its line in :data:`TRANSFORMS`; a new f also needs a function in
:mod:`workflows.functions`.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

#: Added before the logarithm.
LOG_SHIFT = 3


class DenseTransform:
    """A transform of dense columns; this one is ``normalize``, of x itself.

    Attributes:
        name: Its name in the spec.
        normalized: Whether the result is z, which needs mean and standard deviation.
        function: The function of :mod:`workflows.functions` that computes f, above ``minimum``; ""
            if y is x. Transforms with the same function have the same f.
        minimum: Smaller values of x count as this one, and results for integers from it on are
            looked up in a table; None where y is x.
        y_formula: F as text.
    """

    name = "normalize"
    normalized = True
    function = ""
    minimum: int | None = None
    y_formula = "x"

    @property
    def formula(self) -> str:
        """The result as text."""
        return f"({self.y_formula} - mean) / std" if self.normalized else self.y_formula

    def apply(self, x: Any, arrays: ModuleType) -> Any:
        """Return y of filled values.

        Args:
            x: An array or tensor of float64.
            arrays: NumPy, CuPy or PyTorch, which x belongs to.
        """
        return x

    def invert(self, y: Any, arrays: ModuleType) -> Any:
        """Return the raw values with these values of y, those below the minimum as the minimum."""
        return y


class LogNormalize(DenseTransform):
    """The logarithm, normalized.

    Only a few values of Criteo's log are below the bound −2. Without the bound the logarithm of
    x ≤ −3 is −inf or NaN, and normalizing turns the whole column into NaN.

    Attributes:
        shift: Added before the logarithm.
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
    """The logarithm alone, as in TorchRec's NVTabular script (its FillMissing, +2, LogOp)."""

    name = "log"
    normalized = False


class LogPlus2(Log):
    """The logarithm of x + 2, as NVIDIA's DLRM describes it: its values are at least 1 before."""

    name = "log_plus_2"
    function = "log_of_plus_2"
    minimum = -1
    shift = 2
    y_formula = "log(max(x, -1) + 2)"


class Log1pNormalize(LogNormalize):
    """log(1 + x), normalized: for what is never negative, such as seconds since an event."""

    name = "log1p_normalize"
    function = "log_of_plus_1"
    minimum = 0
    shift = 1
    y_formula = "log(max(x, 0) + 1)"


TRANSFORMS: dict[str, DenseTransform] = {
    transform.name: transform
    for transform in (LogNormalize(), Log(), LogPlus2(), Log1pNormalize(), DenseTransform())
}
