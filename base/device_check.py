"""Code for a card, compared with the host's at the start of a run, which goes on with the host's.

What a card computes has been tried with stand-ins only, so each run compares the first part of its
work: a difference or an error is a warning, or, where the user asks for that, an error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import numpy as np

from nvt_torchrec.base.errors import ClickLogError

log = logging.getLogger(__name__)


class DeviceError(ClickLogError):
    """Code for a card fails, or computes something else than the host's."""


def difference(
    device: Callable[[], Mapping[str, np.ndarray]],
    host: Mapping[str, np.ndarray],
    tolerance: float = 0.0,
) -> str:
    """Return how the arrays of a card differ from the host's; "" if they do not.

    Args:
        device: Computes the arrays on the card and copies them to the host. An error of any kind
            is a difference.
        host: The same arrays, by name.
        tolerance: By how much floats may differ, as a share of their magnitude or of 1.
    """
    try:
        computed = device()
        for name, expected in host.items():
            array = computed[name]
            if (array.dtype, array.shape) != (expected.dtype, expected.shape):
                shapes = [f"{a.dtype} {list(a.shape)}" for a in (array, expected)]
                return f"{name} is {' instead of '.join(shapes)}"
            same = array == expected
            if tolerance and expected.dtype.kind == "f":
                same |= np.isclose(array, expected, tolerance, tolerance, equal_nan=True)
            if not same.all():
                at = np.unravel_index(np.argmin(same), same.shape)
                place = ", ".join(map(str, at))
                return (
                    f"{name}[{place}] is {array[at]} instead of {expected[at]} "
                    f"({np.count_nonzero(~same)} of {same.size} values differ)"
                )
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def fall_back(what: str, why: str, instead: str, *, strict: bool) -> None:
    """Warn that the host's code takes over.

    Args:
        what: What failed on the card.
        why: The difference or error.
        instead: What is done from now on.
        strict: Raise an error instead.

    Raises:
        DeviceError: ``strict`` is set.
    """
    if strict:
        raise DeviceError(
            f"{what} differs from the CPU's: {why}",
            "report this; without --strict_gpu the CPU takes over",
        )
    log.warning("%s differs from the CPU's: %s\n  -> %s; please report this", what, why, instead)
