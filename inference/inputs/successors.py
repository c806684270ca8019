"""Whether a bundle can take the place of another one without a change of its clients."""

from __future__ import annotations

from nvt_torchrec.base.errors import SchemaError
from nvt_torchrec.formats.spec.feature_spec import FeatureSpec


def check_same_columns(now: FeatureSpec, new: FeatureSpec, what: str) -> None:
    """Check that a bundle takes the rows that clients send already.

    Args:
        now: The spec of the bundle that is served.
        new: The spec of the bundle that is to replace it.
        what: The new bundle, in errors.

    Raises:
        SchemaError: A column is missing, new, in another place, of another type or read otherwise.
    """
    for kind in ("dense", "categorical"):
        here, there = (
            [(c.name, c.raw, getattr(c, "multi_hot", False)) for c in getattr(spec, kind)]
            for spec in (now, new)
        )
        if here == there:
            continue
        differing = next((a for a, b in zip(here, there, strict=False) if a != b), None)
        column = differing or max(here, there, key=len)[min(len(here), len(there))]
        raise SchemaError(
            f"{what}: its {kind} columns are not those of the bundle that is served: column "
            f"{column[0]} differs ({len(there)} columns, {len(here)} are served)",
            "clients send the columns of the bundle that is served: serve the new one at another "
            "address, from a directory of its own",
        )
    read, other = (set(spec.read_plan(label=False).reads) for spec in (now, new))
    if read != other:
        raise SchemaError(
            f"{what}: it reads column {min(one.source for one in read ^ other)} otherwise than the "
            "bundle that is served",
            "clients send the columns of the bundle that is served, in its formats: serve the new "
            "one at another address, from a directory of its own",
        )
