"""Specs by which some columns of a text without a header are read, and others are not."""

from __future__ import annotations

import dataclasses

from nvt_torchrec.formats.feature_spec.columns import InputFormat
from nvt_torchrec.formats.feature_spec.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.file_formats import INPUT_FORMATS


def name_fields(spec: FeatureSpec) -> InputFormat:
    """Return the input format with names of all fields, as some are not read."""
    if not INPUT_FORMATS[spec.input.format].delimiter or spec.input.header:
        return spec.input
    return dataclasses.replace(spec.input, columns=tuple(spec.file_columns(label=True)))
