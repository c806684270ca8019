"""Whether a bundle can take the place of another one without a change of its clients."""

from __future__ import annotations

import itertools

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
    here, there = (_as_clients_see(spec) for spec in (now, new))
    if here == there:
        return
    names = [a or b for a, b in itertools.zip_longest(here, there) if a != b]
    raise SchemaError(
        f"{what}: its columns are not those of the bundle that is served: {names[0][1]} is in "
        "another place, of another type or read otherwise, or one of both lacks it",
        "clients send the columns of the bundle that is served, in its formats: serve the new one "
        "at another address, from a directory of its own",
    )


def _as_clients_see(spec: FeatureSpec) -> list[tuple]:
    columns = [("dense", c.name, c.raw) for c in spec.dense]
    columns += [("categorical", c.name, c.raw, c.multi_hot) for c in spec.categorical]
    reads = {("read", read.source, repr(read)) for read in spec.read_plan(label=False).reads}
    return columns + sorted(reads)
