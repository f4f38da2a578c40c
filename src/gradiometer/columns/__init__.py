"""The raw columns of T tensors, ``(T, C) float64``, and everything derived from them.

The schema defines each column, how the columns of two parts merge, and the thresholds. Derived values, flags
and scores are functions of columns. The layout of the recorder's ring is here too. Nothing here reads a
user's tensors or their names.
"""

from gradiometer.columns.activations import (
    ACTIVATION_COLUMNS,
    ACTIVATION_DERIVED,
    ACTIVATION_INDEX,
    NUM_ACTIVATION_COLUMNS,
    NUM_ACTIVATION_SUMS,
    activation_value,
    tensor_columns,
)
from gradiometer.columns.derived import DERIVED, compute_flags, rescale
from gradiometer.columns.fingerprint import (
    FINGERPRINT_COLUMNS,
    NUM_FINGERPRINT_COLUMNS,
    WORD_BYTES,
    Fingerprint,
    merge_fingerprints,
)
from gradiometer.columns.health import (
    EXPLODING_WEIGHT,
    HEALTH,
    MAX_NORM_RATIO,
    MAX_ZERO_FRACTION,
    VANISHING_WEIGHT,
    is_healthy,
    score,
)
from gradiometer.columns.pairs import (
    NUM_PAIR_COLUMNS,
    NUM_PAIR_SUMS,
    PAIR_COLUMNS,
    PAIR_DERIVED,
    PAIR_INDEX,
    pair_value,
)
from gradiometer.columns.ring_layout import CURSOR_SIZE, HEADER_SKIPPED, HEADER_STEP, RING_WIDTH, Cursor
from gradiometer.columns.schema import (
    COLUMN_INDEX,
    COLUMN_NAMES,
    COLUMNS,
    DEFAULT_DEAD_THRESHOLD,
    DEFAULT_EXPLODING_THRESHOLD,
    DEFAULT_THRESHOLDS,
    DEFAULT_VANISHING_THRESHOLD,
    NUM_COLUMNS,
    NUM_SUM_COLUMNS,
    Flag,
    Thresholds,
)
from gradiometer.columns.updates import (
    NUM_UPDATE_COLUMNS,
    UPDATE_COLUMNS,
    UPDATE_NAMES,
    UPDATE_STATISTICS,
    from_pairs,
    has_update_value,
    update_value,
)

__all__ = [
    "ACTIVATION_COLUMNS",
    "ACTIVATION_DERIVED",
    "ACTIVATION_INDEX",
    "COLUMNS",
    "COLUMN_INDEX",
    "COLUMN_NAMES",
    "CURSOR_SIZE",
    "DEFAULT_DEAD_THRESHOLD",
    "DEFAULT_EXPLODING_THRESHOLD",
    "DEFAULT_THRESHOLDS",
    "DEFAULT_VANISHING_THRESHOLD",
    "DERIVED",
    "EXPLODING_WEIGHT",
    "FINGERPRINT_COLUMNS",
    "HEADER_SKIPPED",
    "HEADER_STEP",
    "HEALTH",
    "MAX_NORM_RATIO",
    "MAX_ZERO_FRACTION",
    "NUM_ACTIVATION_COLUMNS",
    "NUM_ACTIVATION_SUMS",
    "NUM_COLUMNS",
    "NUM_FINGERPRINT_COLUMNS",
    "NUM_PAIR_COLUMNS",
    "NUM_PAIR_SUMS",
    "NUM_SUM_COLUMNS",
    "NUM_UPDATE_COLUMNS",
    "PAIR_COLUMNS",
    "PAIR_DERIVED",
    "PAIR_INDEX",
    "RING_WIDTH",
    "UPDATE_COLUMNS",
    "UPDATE_NAMES",
    "UPDATE_STATISTICS",
    "VANISHING_WEIGHT",
    "WORD_BYTES",
    "Cursor",
    "Fingerprint",
    "Flag",
    "Thresholds",
    "activation_value",
    "compute_flags",
    "from_pairs",
    "has_update_value",
    "is_healthy",
    "merge_fingerprints",
    "pair_value",
    "rescale",
    "score",
    "tensor_columns",
    "update_value",
]
