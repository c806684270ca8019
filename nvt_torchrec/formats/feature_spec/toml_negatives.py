"""The block ``[negatives]`` of a spec's TOML file."""

from __future__ import annotations

from typing import Any

from nvt_torchrec.formats.feature_spec.negatives import NegativesRule
from nvt_torchrec.formats.feature_spec.toml_parts import check_keys, field_names, make_part


def read_negatives(block: Any, source: str) -> NegativesRule:
    """Return the rule of ``[negatives]``. Raises :class:`SettingsError`."""
    check_keys(block, {*field_names(NegativesRule) - {"table"}, "from"}, source)
    options = dict(block)
    options["table"] = options.pop("from", "")
    return make_part(NegativesRule, options, "negatives: ")
