"""The run record on disk: its format, its writer, its reader, and the comparison of two.

Steps and findings are written to Parquet and JSON files in a folder. `Run` reads them back, also while the
run is still going. This package does not use devices or threads.
"""

from gradiometer.runs.attempts import Attempt
from gradiometer.runs.comparison import BitDifference, Comparison, Difference, Side
from gradiometer.runs.diff import compare_runs, compared
from gradiometer.runs.directory import is_taken
from gradiometer.runs.files import RunError, open_file
from gradiometer.runs.json_files import encodable, parse_json, to_json
from gradiometer.runs.kept_step import KeptStep, kept_path, load_kept_step, plain_batch, write_kept_steps
from gradiometer.runs.rank_blackbox import RankBlackbox
from gradiometer.runs.reader import Run, StepPrecision, read_run
from gradiometer.runs.steps_table import CLIP_FACTOR, CLIP_LIMIT, scalars_of
from gradiometer.runs.verify import File, Verification, verify
from gradiometer.runs.writer import RunRecord

__all__ = [
    "CLIP_FACTOR",
    "CLIP_LIMIT",
    "Attempt",
    "BitDifference",
    "Comparison",
    "Difference",
    "File",
    "KeptStep",
    "RankBlackbox",
    "Run",
    "RunError",
    "RunRecord",
    "Side",
    "StepPrecision",
    "Verification",
    "compare_runs",
    "compared",
    "encodable",
    "is_taken",
    "kept_path",
    "load_kept_step",
    "open_file",
    "parse_json",
    "plain_batch",
    "read_run",
    "scalars_of",
    "to_json",
    "verify",
    "write_kept_steps",
]
