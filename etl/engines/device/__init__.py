"""Counting and encoding on a card, for logs in Criteo's format. None of it has ever run on one."""

from nvt_torchrec.formats.spec.feature_spec import FeatureSpec


def supports(spec: FeatureSpec) -> bool:
    """Return whether a spec is of Criteo's format, and its dense columns all of one function."""
    functions = {spec.transform_of(column).function for column in spec.dense}
    return spec.is_criteo_format and len(functions) < 2
