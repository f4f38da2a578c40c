"""Read a run on disk: tables, matrices, records. ``docs/reference/run-record.md`` describes the format."""

from __future__ import annotations

import bisect
import itertools
import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from gradiometer.columns import (
    COLUMN_NAMES,
    FINGERPRINT_COLUMNS,
    NUM_COLUMNS,
    NUM_FINGERPRINT_COLUMNS,
    NUM_TAP_COLUMNS,
    NUM_UPDATE_COLUMNS,
    TAP_NAMES,
    TAP_STATISTICS,
    UPDATE_NAMES,
    UPDATE_STATISTICS,
    Thresholds,
    derived,
    tap_value,
    update_value,
)
from gradiometer.extras import require
from gradiometer.recorder import KINDS, TAP_KINDS, Roster, StepRecord
from gradiometer.runs.attempts import Attempt, as_of, list_attempts
from gradiometer.runs.files import RunError, stamp, unfit
from gradiometer.runs.findings import FOREVER, load_findings
from gradiometer.runs.format import (
    FINGERPRINTS,
    STEPS,
    TAPS,
    TENSORS,
    UPDATES,
    arrow_schema,
    has_digests,
    list_segments,
    load_roster,
    pyarrow,
    read_info,
    segment_path,
)
from gradiometer.runs.journal import journal_path, list_damaged, list_journals, read_journal
from gradiometer.runs.json_files import from_json, read_json
from gradiometer.runs.precision import ExponentReader
from gradiometer.runs.segments import Segments
from gradiometer.runs.tables import (
    check_steps,
    codes,
    cut,
    fingerprints,
    further,
    numbers,
    put,
    scalars_of,
    unreadable,
)
from gradiometer.terminal import printable

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    import pyarrow as pa
    from torch import Tensor

    from gradiometer.recorder import Kind
    from gradiometer.rules import Finding
    from gradiometer.runs.format import Field
    from gradiometer.runs.journal import Journal

_LOG = logging.getLogger("gradiometer")
# the columns of `TENSORS` that identify a row
_PLACE: Final = ("step", "kind", "name")
_STORED: Final = (*COLUMN_NAMES, "flags", "norm")


def read_run(path: Path | str, *, attempt: int | None = None, skip_damaged: bool = False) -> Run:
    """Open a run on disk; its tables are read when they are accessed.

    Args:
        path: the folder.
        attempt: read the run as it was after this attempt, with the steps that later attempts have
            superseded; None for the last attempt.
        skip_damaged: leave out segments with a damaged file, or only their histograms if only the file of
            exponents is damaged, journals from the damage on, and
            ``findings.json`` and ``blackbox.json`` if they are damaged; ``run.damaged`` lists them, and a
            warning is logged for each. This checks every file at once.

    Raises:
        RunError: if there is no run or attempt, or its version is newer than this package reads. Without
            ``skip_damaged``, methods that read a file later raise it too, if the file is missing or is not
            as it was written.
        ImportError: without pyarrow; ``pip install 'gradiometer[monitor]'`` installs it.

    >>> import tempfile, torch, gradiometer as gm
    >>> model = torch.nn.Linear(2, 1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with gm.Monitor(model, run_dir=folder) as monitor:
    ...         model(torch.tensor([[3.0, 4.0]])).sum().backward()
    ...         monitor.record()
    ...         monitor.advance(loss=0.5)
    ...     record = gm.read_run(folder).record(0)
    >>> record.loss, record.report()["weight"].norm
    (0.5, 5.0)
    """
    return Run(path, attempt=attempt, skip_damaged=skip_damaged)


class Run(ExponentReader):
    """A run on disk, as of when it was opened or last refreshed.

    Rows that a later attempt has superseded are left out: if that attempt began at step s, rows of
    earlier attempts for step s and later no longer belong to the run; ``read_run(path, attempt=...)`` reads
    them.

    Attributes:
        path: the folder.
        info: the content of run.json; if an earlier attempt is read, as it was then.
        attempts: all attempts in the folder.
        roster: the tensors.
        thresholds: the thresholds of the flags.
        damaged: with ``skip_damaged``, what is left out: the error of each file by its path in the folder.
    """

    info: dict[str, Any]
    roster: Roster
    thresholds: Thresholds
    attempts: tuple[Attempt, ...]

    def __init__(self, path: Path | str, *, attempt: int | None = None, skip_damaged: bool = False) -> None:
        self.path = Path(path)
        # attempts after this one are left out
        self._last = FOREVER if attempt is None else attempt
        self.damaged: dict[str, str] = {}
        self._skip = skip_damaged
        self._files = Segments(self.path)
        self._seen: Any = None
        # a segment is identified by its attempt and its first step
        self._segments: list[tuple[int, int]] = []
        self._stamps: Mapping[tuple[int, int], Any] = {}
        self._begins: dict[int, int] = {}  # for each attempt, the first step that it wrote
        self._ends: dict[int, int] = {}  # for each attempt, its first superseded step
        self._limits: dict[tuple[int, int], int] = {}
        self._journals: dict[tuple[int, int], Journal] = {}
        self._kept: dict[tuple[int, int], tuple[Any, pa.Table]] = {}
        self._steps: pa.Table | None = None
        # segments whose file of exponents is left out
        self._without: set[tuple[int, int]] = set()
        pyarrow()
        self.refresh()

    def __repr__(self) -> str:
        """Return one line, without reading files."""
        path, tensors = printable(str(self.path)), len(self.roster.names)
        return f"<Run: {path}, {len(self._segments)} segments, {tensors} tensors>"

    def refresh(self) -> bool:
        """Load what was written since the last call; return whether anything was. Reads only new files."""
        journals, segments = list_journals(self.path), list_segments(self.path)
        files = [stamp(self.path / name) for name in ("run.json", "findings.json", "blackbox.json")]
        if (journals, segments, files) == self._seen:
            return False
        info = read_info(self.path)
        # before the Parquet files, which get what a journal loses
        found = [(key, read_journal(self.path, *key)) for key in list_journals(self.path)]
        for _, journal in found:
            if journal is not None and journal.error is not None and not self._skip:
                raise journal.error
        segments = list_segments(self.path)  # again, so that none is older than run.json
        whole, info = info, as_of(info, self._last)
        try:
            roster = load_roster(info["roster"])
            thresholds = Thresholds(**{name: float(value) for name, value in info["thresholds"].items()})
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            msg = f"{self.path / 'run.json'} has unexpected content ({error!r}): fix it"
            raise RunError(msg) from None
        self.info, self.roster, self.thresholds = info, roster, thresholds
        self._journals = {key: journal for key, journal in found if journal is not None}
        self._files.update(segments, info, self._journals)
        self._seen = journals, segments, files
        keys = sorted({*segments, *self._files.journals})
        damaged = [key for key, journal in self._journals.items() if journal.error is not None]
        # from the written segments, so that an attempt that wrote nothing supersedes nothing
        begins: dict[int, int] = {}
        # also those whose files are missing or damaged, lest rows come back that do not belong to the run
        wrote = [(x["attempt"], x["first_step"]) for x in whole.get("attempts", []) if x.get("wrote") is True]
        for attempt, first in sorted([*keys, *damaged, *list_damaged(self.path), *wrote]):
            begins.setdefault(attempt, first)
        self.attempts = list_attempts(whole.get("attempts", []), begins)
        known = [attempt.number for attempt in self.attempts]
        if self._last != FOREVER and self._last not in known:
            there = f"it has {known[0]} to {known[-1]}" if known else "it has none"
            msg = f"{self.path} has no attempt {self._last}; {there}"
            raise RunError(msg)
        self._begins = {attempt: first for attempt, first in begins.items() if attempt <= self._last}
        self._ends = {
            attempt: min([first for later, first in self._begins.items() if later > attempt], default=FOREVER)
            for attempt in self._begins
        }
        self._segments = [key for key in keys if key[1] < self._ends.get(key[0], -1)]
        self._stamps = segments
        # the first step after each: a file may have got more since the next one was listed
        nexts = [first for _, first in self._segments[1:]]
        self._limits = {
            key: min(self._ends[key[0]], following)
            for key, following in zip(self._segments, [*nexts, FOREVER], strict=False)
        }
        self._kept = {key: kept for key, kept in self._kept.items() if key in segments}
        self._steps = None
        if self._skip:
            self._skip_damaged()
        return True

    def _skip_damaged(self) -> None:
        """Leave out segments with a damaged file, and note what is damaged."""
        before, self.damaged, left = self.damaged, {}, dict.fromkeys(self._segments)
        for key, journal in self._journals.items():
            if journal.error is not None:
                self.damaged[journal_path(self.path, *key).name] = str(journal.error)
        for key, table in itertools.product(self._segments, ("steps", "tensors")):
            try:
                self._files.claims(table, key)
            except RunError as error:
                left.pop(key, None)
                self.damaged[f"{table}/{segment_path(self.path, table, *key).name}"] = str(error)
        self._without = set()
        for key in left:
            try:
                if self._files.has_exponents(key):
                    self._files.claims("exponents", key)
            except RunError as error:
                self._without.add(key)
                name = segment_path(self.path, "exponents", *key).name
                self.damaged[f"exponents/{name}"] = str(error)
        # they still supersede what their names say, lest rows come back that do not belong to the run
        self._segments = list(left)
        for name, read in (("findings.json", self._read_findings), ("blackbox.json", self._read_blackbox)):
            try:
                read()
            except RunError as error:
                self.damaged[name] = str(error)
        for name in self.damaged.keys() - before.keys():
            _LOG.warning("left out: %s", self.damaged[name])

    @property
    def has_fingerprints(self) -> bool:
        """Whether an attempt has recorded fingerprints; `StepRecord.fingerprints` returns those of a step."""
        return any([x.get("fingerprint") is True for x in (self.info, *self.info.get("attempts", []))])

    @property
    def steps(self) -> pa.Table:
        """One row per step, ascending; the columns are `STEPS`."""
        if self._steps is None:
            tables = [arrow_schema(STEPS).empty_table(), *map(self._steps_of, self._segments)]
            self._steps = pyarrow().concat_tables(tables)
        return self._steps

    def tensors(
        self,
        *,
        columns: Collection[str] | None = None,
        kind: Kind | None = None,
        names: Collection[str] | str | None = None,
        first: int | None = None,
        last: int | None = None,
    ) -> pa.Table:
        """Return one row per step, kind and measured parameter or tap, in that order.

        Args:
            columns: names of columns in `TENSORS`, `FINGERPRINTS`, `UPDATES` or `TAPS`; None for all, but for
                those of the latter three only if fingerprints, updates or activations were recorded. They
                are null where none was.
            kind: only rows of this kind.
            names: only rows of these parameters or taps; a string is one name.
            first: only from this step on.
            last: only up to and including this step.
        """
        schema = arrow_schema((*TENSORS, *FINGERPRINTS, *UPDATES, *TAPS))
        # at first those that every file has
        own = arrow_schema(TENSORS).names if columns is None else list(columns)
        columns = schema.names if columns is None else own
        for name in columns:
            if name not in schema.names:
                msg = f"there is no column {name!r} of tensors; choose from {', '.join(schema.names)}"
                raise RunError(msg)
        if kind is not None:
            self._check_kind(kind)
        ds = require("pyarrow.dataset", "monitor", "A run record")
        tables = [pyarrow().schema([schema.field(name) for name in own]).empty_table()]
        for key in self._between(first, last):
            low, high = self._bounds(key, first, last)
            where = (ds.field("step") >= low) & (ds.field("step") <= high)
            if kind is not None:
                where &= ds.field("kind") == kind
            if names is not None:
                where &= ds.field("name").isin([names] if isinstance(names, str) else list(names))
            tables.append(self._files.read("tensors", key, columns, where))
        return pyarrow().concat_tables(tables, promote_options="default").unify_dictionaries()

    def matrix(
        self, statistic: str, kind: Kind = "grads", *, first: int | None = None, last: int | None = None
    ) -> tuple[list[int], Tensor]:
        """Return one statistic of every tensor in every recorded step.

        Args:
            statistic: a raw column, a derived value such as ``"rms"``, or ``"flags"``; for updates also
                ``"update_ratio"``, ``"descent_cosine"``, ``"unchanged_fraction"``, ``"stuck_fraction"`` and
                the columns of `UPDATES`, and for activations and their gradients ``"outlier_ratio"``,
                ``"kurtosis"``, ``"zero_channel_fraction"`` and the columns of `TAPS`.
            kind: one of `KINDS`.
            first: only from this step on.
            last: only up to and including this step.

        Returns:
            S steps, ascending, and ``(S, N) float64``. NaN where the parameter was not measured in that
            step. A norm is also NaN or inf where the tensor has a NaN or Inf; ``matrix("n_nan")``
            distinguishes the cases, and ``matrix("finite_norm")`` is the norm of the finite elements.
        """
        steps, found = self.matrices([statistic], kind, first=first, last=last)
        return steps, found[statistic]

    def matrices(
        self,
        statistics: Sequence[str],
        kind: Kind = "grads",
        *,
        first: int | None = None,
        last: int | None = None,
    ) -> tuple[list[int], dict[str, Tensor]]:
        """Return several statistics by name, each as `matrix` returns it; files are read only once."""
        is_tap = kind in TAP_KINDS
        of_taps, of_updates = (*TAP_STATISTICS, *TAP_NAMES), (*UPDATE_STATISTICS, *UPDATE_NAMES)
        more = of_taps if is_tap else of_updates if kind == "updates" else ()
        for statistic in statistics:
            if statistic not in _STORED and statistic not in derived.DERIVED and statistic not in more:
                names = ", ".join(dict.fromkeys([*_STORED, *derived.DERIVED, *more]))
                msg = f"there is no statistic {statistic!r}; choose from {names}"
                raise RunError(msg)
        self._check_kind(kind)
        steps = self._recorded(first, last)
        size = len(steps), 1, len(self.roster.names)
        self._files.check_cells(self._between(first, last), len(statistics) * math.prod(size))
        out = {name: torch.full(size, torch.nan, dtype=torch.float64, device="cpu") for name in statistics}
        stored = [name for name in out if name in _STORED]
        raw = [] if len(stored) == len(out) else list(COLUMN_NAMES)
        columns = list(dict.fromkeys([*raw, *stored]))
        own, own_value = (TAPS, tap_value) if is_tap else (UPDATES, update_value)
        further_names = [field.name for field in own] if any([name in more for name in out]) else []
        for key in self._between(first, last) if out else ():
            table = self._tensors_of(key, [*columns, *further_names], first, last)
            values = {name: numbers(table[name]).to(torch.float64) for name in columns}
            matrix = torch.stack([values[name] for name in raw], dim=1) if raw else None
            # rows of other kinds get no place
            places = self._places(table, steps, (kind,))
            for name, to in out.items():
                if matrix is None or name in stored:
                    found = values[name]
                elif name in more:
                    found = own_value(matrix, further(table, own), name)
                else:
                    found = derived.value(matrix, name)
                put(to, found, places)
        return steps.tolist(), {name: values.squeeze(1) for name, values in out.items()}

    def record(self, step: int) -> StepRecord:
        """Return one step.

        Raises:
            RunError: if the run has no such step.
        """
        for record in self.records(step, step):
            return record
        known = self.steps["step"]
        there = f"it has {len(known)}, from {known[0]} to {known[-1]}" if len(known) else "it has none yet"
        msg = f"{self.path} has no step {step}; {there}"
        raise RunError(msg)

    def records(self, first: int | None = None, last: int | None = None) -> Iterator[StepRecord]:
        """Iterate over the steps, ascending, from ``first`` to ``last`` inclusive. Files are read lazily."""
        for key in self._between(first, last):
            rows = cut(self._steps_of(key), first, last)
            values, more, of_taps = self._dense(key, numbers(rows["step"]))
            columns = [rows[name].to_pylist() for name in ("step", "time", "recorded", "skipped")]
            for scalars, dense, of_updates, tap_sums, (step, time, recorded, skipped) in zip(
                scalars_of(rows), values, more, of_taps, zip(*columns, strict=True), strict=True
            ):
                kept = dense if recorded else None
                record = StepRecord(step, time, scalars, self.roster, kept, skipped, self.thresholds)
                yield replace(record, further=of_updates, tap_sums=tap_sums) if recorded else record

    @property
    def findings(self) -> list[Finding]:
        """The findings of the rules, without those that later attempts have superseded."""
        return [] if "findings.json" in self.damaged else self._read_findings()

    @property
    def blackbox(self) -> dict[str, Any] | None:
        """The report of the last fault in any of the attempts that are read; None if there was none."""
        return None if "blackbox.json" in self.damaged else self._read_blackbox()

    def _read_findings(self) -> list[Finding]:
        return load_findings(
            self.path,
            self.info,
            self._closed_with("findings.json"),
            self._ends,
            self._last,
            lambda: [self._files.claims("steps", key) for key in self._begins.items() if key in self._stamps],
        )

    def _read_blackbox(self) -> dict[str, Any] | None:
        # the newest, and those that the faults of later attempts have replaced
        earlier = [] if self._last == FOREVER else sorted(self.path.glob("blackbox-[0-9]*.json"))[::-1]
        for path in (self.path / "blackbox.json", *earlier):
            content = read_json(path, self._closed_with(path.name), needs_digest=has_digests(self.info))
            found: dict[str, Any] | None = from_json(content)
            if not isinstance(found, dict | None):
                raise unfit(path, f"{found!r:.40}")
            attempt = 1 if found is None else found.get("attempt", 1)
            if not isinstance(attempt, int):
                raise unfit(path, f"attempt: {attempt!r:.40}")
            if found is not None and attempt <= self._last:
                return found
        return None

    def _closed_with(self, name: str) -> str | None:
        """Return the digest of a JSON file of a closed run; None if it is not known, or out of date."""
        # a writer that continues the run replaces run.json first
        is_current = stamp(self.path / "run.json") == self._seen[-1][0]
        return self.info.get("files", {}).get(name) if is_current else None

    def _steps_of(self, key: tuple[int, int]) -> pa.Table:
        """Return the rows of a segment that are not superseded."""
        seen = self._stamps.get(key), self._limits[key]
        if key not in self._kept or self._kept[key][0] != seen:
            table = self._files.read("steps", key)
            # a column may be newer than the segment, or newer than this reader
            none = arrow_schema(STEPS).empty_table()
            try:
                table = pyarrow().concat_tables([none, table], promote_options="default")
                table = table.select(none.column_names)
                check_steps(table, key[1])
            except (ValueError, pyarrow().ArrowException) as error:
                raise unreadable(segment_path(self.path, "steps", *key), error) from None
            self._kept[key] = seen, cut(table, None, self._limits[key] - 1).combine_chunks()
        return self._kept[key][1]

    def _between(self, first: int | None, last: int | None) -> list[tuple[int, int]]:
        """Return the segments that may have steps from ``first`` to ``last``."""
        # segments that are not superseded are in the order of steps, whatever their attempt
        starts = [start for _, start in self._segments]
        low = 0 if first is None else max(bisect.bisect_right(starts, first) - 1, 0)
        high = len(starts) if last is None else bisect.bisect_right(starts, last)
        return self._segments[low:high]

    def _bounds(self, key: tuple[int, int], first: int | None, last: int | None) -> tuple[int, int]:
        """Return the first and last step to read from a segment, inclusive."""
        # from the steps file: the tensors file has more, if the writer was killed between the two
        known = self._steps_of(key)["step"]
        low, high = (known[0].as_py(), known[-1].as_py()) if len(known) else (0, -1)
        return low if first is None else max(low, first), high if last is None else min(high, last)

    def _recorded(self, first: int | None, last: int | None) -> Tensor:
        steps = cut(self.steps, first, last)
        return numbers(steps.filter(steps["recorded"])["step"])

    def _tensors_of(
        self, key: tuple[int, int], columns: Sequence[str], first: int | None, last: int | None
    ) -> pa.Table:
        """Return rows of a segment with the columns that identify them; other steps may be included."""
        where = None
        low, high = self._bounds(key, first, last)
        if (low, high) != self._bounds(key, None, None):
            ds = require("pyarrow.dataset", "monitor", "A run record")
            where = (ds.field("step") >= low) & (ds.field("step") <= high)
        return self._files.read("tensors", key, [*_PLACE, *columns], where)

    def _places(self, table: pa.Table, steps: Tensor, kinds: Sequence[str]) -> tuple[Tensor, ...]:
        """Return the indices of each row's step, kind and name; -1 for one that is not in the lists."""
        found = numbers(table["step"])
        if len(steps):
            rows = torch.searchsorted(steps, found).clamp_(max=len(steps) - 1)
            rows.masked_fill_(steps[rows] != found, -1)
        else:
            rows = torch.full_like(found, -1)
        kind_index = {name: i for i, name in enumerate(kinds)}
        return rows, codes(table["kind"], kind_index), codes(table["name"], self.roster.index)

    def _dense(
        self, key: tuple[int, int], steps: Tensor
    ) -> tuple[Tensor, Iterable[Tensor | None], Iterable[Tensor | None]]:
        """Return ``values``, ``further`` and ``tap_sums`` of `StepRecord` for steps of a segment.

        ``(S, K, N, C + 1 or C + 4) float64``, and for each step ``(N, 5)`` and ``(2, N, 4)``, or None.
        """
        size = len(steps), len(self.roster.kinds), len(self.roster.names)
        width = NUM_COLUMNS + 1 + NUM_FINGERPRINT_COLUMNS * self.has_fingerprints
        has_updates = "updates" in self.roster.kinds
        has_taps = TAP_KINDS[0] in self.roster.kinds
        # at most, for the updates and activations alone
        width += NUM_UPDATE_COLUMNS * has_updates + NUM_TAP_COLUMNS * has_taps
        self._files.check_cells([key], math.prod(size) * width)
        if not len(steps):
            return torch.zeros((*size, NUM_COLUMNS + 1), dtype=torch.float64, device="cpu"), [], []
        columns = [*COLUMN_NAMES, "flags"]
        wanted = [*columns, *FINGERPRINT_COLUMNS, *(UPDATE_NAMES if has_updates else ())]
        wanted += TAP_NAMES if has_taps else ()
        table = self._tensors_of(key, wanted, int(steps[0]), int(steps[-1]))
        values = torch.stack([numbers(table[name]).to(torch.float64) for name in columns], dim=1)
        bits = fingerprints(table)
        if bits is not None:
            values = torch.cat([values, bits.view(torch.float64)], dim=1)
        # 0 where nothing was measured
        out = torch.zeros((*size, values.shape[1]), dtype=torch.float64, device="cpu")
        put(out, values, self._places(table, steps, self.roster.kinds))
        of_updates = self._further(table, steps, UPDATES, ("updates",))
        tap_sums = self._further(table, steps, TAPS, TAP_KINDS)
        nothing = [None] * len(steps)
        return (
            out,
            nothing if of_updates is None else of_updates.squeeze(1),
            nothing if tap_sums is None else tap_sums,
        )

    def _further(
        self, table: pa.Table, steps: Tensor, fields: Sequence[Field], kinds: Sequence[str]
    ) -> Tensor | None:
        """Return further columns of some kinds, ``(S, len(kinds), N, len(fields))``; None without them."""
        if not {field.name for field in fields} <= {*table.column_names}:
            return None
        size = len(steps), len(kinds), len(self.roster.names), len(fields)
        more = torch.zeros(size, dtype=torch.float64, device="cpu")
        put(more, further(table, fields), self._places(table, steps, kinds))
        return more

    def _check_kind(self, kind: str) -> None:
        if kind not in self.roster.kinds:
            kinds = ", ".join(self.roster.kinds)
            more = ", ".join([*[f"{name}=True" for name in KINDS[1:] if name not in TAP_KINDS], "taps=..."])
            msg = f"{self.path} has no {kind!r}; choose from {kinds}, or record more with Monitor({more})"
            raise RunError(msg)
