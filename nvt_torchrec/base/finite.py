"""Find NaN and infinity in tensors, so that such weights are not saved, loaded or served.

Only methods of the tensors are called, so PyTorch need not be imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def flatten(state: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the tensors of nested dicts, named as torch.distributed.checkpoint names them."""
    for key, value in state.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def find_not_finite(state: dict[str, Any]) -> str:
    """Return the name of the first floating-point tensor with NaN or infinity; "" without one.

    Only this process's shards of a sharded tensor are checked.
    """
    for name, tensor in flatten(state):
        parts = [tensor]
        if hasattr(tensor, "local_shards"):
            parts = [shard.tensor for shard in tensor.local_shards()]
        for part in parts:
            if part.is_floating_point() and part.numel() and not _is_finite(part.detach()):
                return name
    return ""


def _is_finite(tensor: Any) -> bool:
    """Return whether all elements are finite.

    It suffices to check the smallest and the largest element, which are NaN if any element is. They
    are found in one pass without allocation; torch.isfinite would allocate a tensor of results.
    """
    low, high = tensor.aminmax()
    return bool(low.isfinite() & high.isfinite())
