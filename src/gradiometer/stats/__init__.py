"""`TensorStats` on the device, `Report` on the host, and the functions that collect them.

The functions take named tensors and return columns and flags, one row per tensor, without host
synchronization. One copy to the host turns them into reports, tables and mappings by module or group.
Nothing here modifies a tensor.
"""

from gradiometer.stats.activation_stats import ActivationReport, ActivationRow, ActivationStats
from gradiometer.stats.attention_taps import (
    EXPERT_LOAD,
    MAX_LOGIT,
    MAX_LOGIT_BOUND,
    ROUTER_ENTROPY,
    tap_attention,
    tap_router,
)
from gradiometer.stats.block_formats import BlockLosses, block_losses
from gradiometer.stats.collect import collect, collect_grads, collect_weights, grad_norm, total_norm
from gradiometer.stats.compare import collect_updates, compare, updates_of
from gradiometer.stats.ema import EMA, Smoothed
from gradiometer.stats.exponent_stats import ExponentStats, collect_exponents, precision_report
from gradiometer.stats.fingerprint import NOT_COMPARED, check_replicas, fingerprint, leaves, texts
from gradiometer.stats.float64_module import Float64Module, first_unfit
from gradiometer.stats.group_ratio import group_ratio
from gradiometer.stats.grouping import GroupRule, pairs_of
from gradiometer.stats.host_copy import Pending, fetch, outside_of_a_graph
from gradiometer.stats.materialize import materialize, materialize_async
from gradiometer.stats.measure import (
    grads_of,
    measure,
    over_ranks,
    over_ranks_with,
    plain,
    redistributed,
)
from gradiometer.stats.named_stats import NamedStats, stats_of
from gradiometer.stats.norms import Norms, finite_norm, norms_of, order_of
from gradiometer.stats.pair_stats import PairReport, PairRow, PairStats
from gradiometer.stats.plot import INK, new_axes
from gradiometer.stats.precision_report import FormatFit, PrecisionReport, PrecisionRow
from gradiometer.stats.project import check_hashed, check_projections, collect_projections, projections_of
from gradiometer.stats.projection_stats import ProjectionStats
from gradiometer.stats.repeats import is_repeating, keep_in_repeats, repeating
from gradiometer.stats.report import ModuleReports, Report, TensorReport
from gradiometer.stats.snapshot import Snapshot
from gradiometer.stats.table_report import TableReport, report_of
from gradiometer.stats.tap_hooks import run_eagerly
from gradiometer.stats.taps import HEAD, Taps, tap
from gradiometer.stats.tensor_stats import TensorStats
from gradiometer.stats.text_table import (
    TextTable,
    aligned,
    amount,
    html,
    number,
    percent,
    preformatted,
    with_short_names,
)

__all__ = [
    "EMA",
    "EXPERT_LOAD",
    "HEAD",
    "INK",
    "MAX_LOGIT",
    "MAX_LOGIT_BOUND",
    "NOT_COMPARED",
    "ROUTER_ENTROPY",
    "ActivationReport",
    "ActivationRow",
    "ActivationStats",
    "BlockLosses",
    "ExponentStats",
    "Float64Module",
    "FormatFit",
    "GroupRule",
    "ModuleReports",
    "NamedStats",
    "Norms",
    "PairReport",
    "PairRow",
    "PairStats",
    "Pending",
    "PrecisionReport",
    "PrecisionRow",
    "ProjectionStats",
    "Report",
    "Smoothed",
    "Snapshot",
    "TableReport",
    "Taps",
    "TensorReport",
    "TensorStats",
    "TextTable",
    "aligned",
    "amount",
    "block_losses",
    "check_hashed",
    "check_projections",
    "check_replicas",
    "collect",
    "collect_exponents",
    "collect_grads",
    "collect_projections",
    "collect_updates",
    "collect_weights",
    "compare",
    "fetch",
    "fingerprint",
    "finite_norm",
    "first_unfit",
    "grad_norm",
    "grads_of",
    "group_ratio",
    "html",
    "is_repeating",
    "keep_in_repeats",
    "leaves",
    "materialize",
    "materialize_async",
    "measure",
    "new_axes",
    "norms_of",
    "number",
    "order_of",
    "outside_of_a_graph",
    "over_ranks",
    "over_ranks_with",
    "pairs_of",
    "percent",
    "plain",
    "precision_report",
    "preformatted",
    "projections_of",
    "redistributed",
    "repeating",
    "report_of",
    "run_eagerly",
    "stats_of",
    "tap",
    "tap_attention",
    "tap_router",
    "texts",
    "total_norm",
    "updates_of",
    "with_short_names",
]
