"""The raw columns of T tensors, ``(T, C) float64``, and everything derived from them.

The schema defines each column, how the columns of two parts merge, and the thresholds. Derived values, flags
and scores are functions of columns. The layout of the recorder's ring is here too. Nothing here reads a
user's tensors or their names.
"""

from gradiometer.columns.activations import ACTIVATION_COLUMNS, ACTIVATIONS
from gradiometer.columns.attention import ATTENTION, RESIDUAL
from gradiometer.columns.exponents import (
    EXPONENT_EDGES,
    EXPONENTS,
    FORMATS,
    HIGHEST_BINADE,
    LOWEST_BINADE,
    best_scales,
    bin_of,
    format_of,
    log2_of,
    losses,
    of_binades,
    power_of_two,
    quantile,
)
from gradiometer.columns.fingerprint import (
    FINGERPRINT_COLUMNS,
    NUM_FINGERPRINT_COLUMNS,
    WORD_BYTES,
    Fingerprint,
    merge_fingerprints,
)
from gradiometer.columns.lines import LINES, line_weights
from gradiometer.columns.pairs import PAIR_COLUMNS, PAIRS
from gradiometer.columns.projections import (
    DEFAULT_PROJECTIONS,
    FIRST_PROJECTION,
    PROJECTIONS,
    sign_hash,
    sign_keys,
)
from gradiometer.columns.ring_layout import (
    CURSOR_SIZE,
    HEADER_SECTIONS,
    HEADER_SKIPPED,
    HEADER_STEP,
    Cursor,
    Section,
)
from gradiometer.columns.roots import sqrt
from gradiometer.columns.rows import first_rank, merge_groups, number, realized, spread, take
from gradiometer.columns.schema import (
    DEFAULT_DEAD_THRESHOLD,
    DEFAULT_EXPLODING_THRESHOLD,
    DEFAULT_THRESHOLDS,
    DEFAULT_VANISHING_THRESHOLD,
    Column,
    Derived,
    Flag,
    Schema,
    Thresholds,
)
from gradiometer.columns.tensors import COLUMNS, TENSORS

__all__ = [
    "ACTIVATIONS",
    "ACTIVATION_COLUMNS",
    "ATTENTION",
    "COLUMNS",
    "CURSOR_SIZE",
    "DEFAULT_DEAD_THRESHOLD",
    "DEFAULT_EXPLODING_THRESHOLD",
    "DEFAULT_PROJECTIONS",
    "DEFAULT_THRESHOLDS",
    "DEFAULT_VANISHING_THRESHOLD",
    "EXPONENTS",
    "EXPONENT_EDGES",
    "FINGERPRINT_COLUMNS",
    "FIRST_PROJECTION",
    "FORMATS",
    "HEADER_SECTIONS",
    "HEADER_SKIPPED",
    "HEADER_STEP",
    "HIGHEST_BINADE",
    "LINES",
    "LOWEST_BINADE",
    "NUM_FINGERPRINT_COLUMNS",
    "PAIRS",
    "PAIR_COLUMNS",
    "PROJECTIONS",
    "RESIDUAL",
    "TENSORS",
    "WORD_BYTES",
    "Column",
    "Cursor",
    "Derived",
    "Fingerprint",
    "Flag",
    "Schema",
    "Section",
    "Thresholds",
    "best_scales",
    "bin_of",
    "first_rank",
    "format_of",
    "line_weights",
    "log2_of",
    "losses",
    "merge_fingerprints",
    "merge_groups",
    "number",
    "of_binades",
    "power_of_two",
    "quantile",
    "realized",
    "sign_hash",
    "sign_keys",
    "spread",
    "sqrt",
    "take",
]
