"""Feature specs: what columns a raw log has, how they are typed, and how they are transformed."""

from nvt_torchrec.formats.feature_spec.columns import CategoricalColumn, DenseColumn, InputFormat
from nvt_torchrec.formats.feature_spec.feature_spec import FeatureSpec

__all__ = ["CategoricalColumn", "DenseColumn", "FeatureSpec", "InputFormat"]
