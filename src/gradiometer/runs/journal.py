"""The journal of a run: steps that no Parquet file has yet, appended to a file as they arrive.

A journal is a sequence of frames. A frame is a header of 60 bytes, a JSON text, and numbers. The header has
`_MAGIC`; the number of bytes of the text and of the numbers, 8 bytes each; a SHA-256 digest in 32 bytes; and
the CRC-32 of these. The digest is that of the digest of the frame before, the header up to here, the text and
the numbers. All integers are little-endian.

The first frame has no numbers; its text has the attempt, its first step, the columns and the tensors. The
text of each other frame is a list of ``[step, time, recorded, skipped, scalars]``, with ``[kinds, C, M]`` at
the end for a step with histograms of exponents; its numbers are the
columns, with the flags, of the recorded steps: ``(S, K, N, C + 1) float64``. Fingerprints, if they are
recorded, are three more columns with the bits of the integers. With updates there are five more, and with
activations four more, which are 0 for other kinds. Then come, for each step with histograms, the places of
its M counts in ``(K, N, C)``, flat, and the counts, int64. The numbers are not compressed, so a small file
can't take much memory.

A killed process leaves at most the beginning of a frame, and a power failure may leave zeros; both are
ignored.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import operator
import re
import struct
import weakref
import zlib
from dataclasses import replace
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple

import torch

from gradiometer.columns import (
    COLUMN_NAMES,
    FINGERPRINT_COLUMNS,
    NUM_EXPONENT_COLUMNS,
    TAP_NAMES,
    UPDATE_NAMES,
)
from gradiometer.recorder import TAP_KINDS, Roster, StepExponents, StepRecord
from gradiometer.runs.digest import DamageError
from gradiometer.runs.directory import is_at
from gradiometer.runs.files import RunError, file_error, open_file, stamp, summary
from gradiometer.runs.format import LARGEST_ATTEMPT, load_roster, pyarrow
from gradiometer.runs.json_files import encodable, from_json, parse_json, plain

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from torch import Tensor

_MAGIC: Final = b"GRADJNL1"
_SIZES: Final = struct.Struct("<8sQQ")
# with the digest and the CRC
_HEADER: Final = _SIZES.size + 32 + 4
# a power failure may leave so many zeros
_BLOCK: Final = 1 << 26
_DAMAGED: Final = "damaged-"
_COLUMNS: Final = (*COLUMN_NAMES, "flags")
_LARGEST_STEP: Final = 2**63 - 1
_MOST: Final = 2**53  # elements in a bin of a histogram


class Journal(NamedTuple):
    """What a journal holds.

    Attributes:
        roster: the tensors of its steps; None if nothing can be read.
        records: the steps, ascending, up to the first damage.
        error: what is damaged; None if nothing is.
        is_unreadable: whether the error is not damage, but that the file cannot be read now.
    """

    roster: Roster | None
    records: list[StepRecord]
    error: RunError | None = None
    is_unreadable: bool = False


def journal_path(run: Path, attempt: int, first_step: int) -> Path:
    """Return the path of a journal."""
    return run / f"journal-{attempt:04d}-{first_step:010d}.bin"


def list_journals(run: Path, prefix: str = "") -> dict[tuple[int, int], Any]:
    """Return the `stamp` of each journal by attempt and first step, ascending."""
    found = {}
    for path in run.glob(f"{prefix}journal-*.bin"):
        if match := re.fullmatch(rf"{prefix}journal-(\d+)-(\d+)\.bin", path.name):
            found[int(match[1]), int(match[2])] = stamp(path)
    return dict(sorted(found.items()))


def keep_damaged(path: Path) -> Path:
    """Give a damaged journal a name under which it is not read, and return its path.

    It still supersedes steps of earlier attempts; `list_damaged` lists it.
    """
    kept = path.with_name(_DAMAGED + path.name)
    if kept.exists():
        return path
    try:
        return path.rename(kept)
    except OSError:
        return path


def list_damaged(run: Path) -> list[tuple[int, int]]:
    """Return attempt and first step of each journal that `keep_damaged` has kept."""
    return list(list_journals(run, _DAMAGED))


class JournalWriter:
    """Appends steps to a new journal.

    Args:
        run: the folder.
        attempt: the attempt that writes it.
        first_step: the first step that will be appended.
        roster: the tensors of the steps.
        fingerprint: whether the steps have fingerprints.
    """

    def __init__(
        self, run: Path, attempt: int, first_step: int, roster: Roster, *, fingerprint: bool = False
    ) -> None:
        self.path = journal_path(run, attempt, first_step)
        columns = (*_COLUMNS, *FINGERPRINT_COLUMNS) if fingerprint else _COLUMNS
        # for all kinds, so that earlier releases can read it
        columns += UPDATE_NAMES if "updates" in roster.kinds else ()
        columns += TAP_NAMES if TAP_KINDS[0] in roster.kinds else ()
        head = {"attempt": attempt, "first_step": first_step, "columns": columns}
        head |= {"names": [encodable(name) for name in roster.names], "shapes": roster.shapes}
        self._head = head | {"dtypes": roster.dtypes, "kinds": roster.kinds}
        self._file: IO[bytes] | None = None
        self._size = 0  # of whole frames
        self._digest = b""

    def append(self, records: Sequence[StepRecord]) -> None:
        """Append steps; if that fails, it can be called again."""
        frames = [] if self._size else [_frame(self._head, [], b"")]
        digest = frames[0][1] if frames else self._digest
        numbers = [_bytes(x) for x in records if x.recorded]
        found = [x.exponents for x in records if x.exponents is not None]
        numbers += [_buffer(part) for x in found for part in x.sparse()]
        frames.append(_frame([_entry(x) for x in records], numbers, digest))
        data = memoryview(b"".join([part for parts, _ in frames for part in parts]))
        if self._file is None:
            # a link that was put there is removed, not followed
            self.path.unlink(missing_ok=True)
            self._file = self.path.open("xb", buffering=0)
            # also if this object is garbage-collected
            weakref.finalize(self, self._file.close)
        try:
            # over what a failed call has left
            self._file.seek(self._size)
            self._file.truncate()
            left = data
            while left:
                left = left[self._file.write(left) :]
        except BaseException:
            if not self._size:
                self.close(remove=True)
            raise
        self._size += len(data)
        self._digest = frames[-1][1]

    @property
    def is_there(self) -> bool:
        """Whether nobody has removed the file."""
        return self._file is None or is_at(self.path, self._file)

    def close(self, *, remove: bool) -> None:
        """Close the file, and remove it if its steps are in Parquet files."""
        file, self._file = self._file, None
        if file is not None:
            file.close()
            if remove:
                self.path.unlink(missing_ok=True)


def _entry(record: StepRecord) -> list[Any]:
    entry = [record.step, record.time, record.recorded, record.skipped, record.scalars]
    found = record.exponents
    return entry if found is None else [*entry, [found.kinds, found.size[2], len(found.sparse()[0])]]


def _bytes(record: StepRecord) -> Any:
    values: Tensor = record.values  # type: ignore[assignment]
    if "updates" in record.roster.kinds:
        more = values.new_zeros((*values.shape[:2], len(UPDATE_NAMES)))
        more[record.roster.place("updates")] = math.nan if record.further is None else record.further
        values = torch.cat([values, more], dim=2)
    if TAP_KINDS[0] in record.roster.kinds:
        more = values.new_zeros((*values.shape[:2], len(TAP_NAMES)))
        more[-len(TAP_KINDS) :] = math.nan if record.tap_sums is None else record.tap_sums
        values = torch.cat([values, more], dim=2)
    return _buffer(values)


def _buffer(values: Tensor) -> Any:
    values = values.contiguous()
    return pyarrow().foreign_buffer(values.data_ptr(), values.nbytes, base=values)


def _frame(said: Any, numbers: Sequence[Any], previous: bytes) -> tuple[list[Any], bytes]:
    """Return the parts of a frame, and its digest."""
    text = json.dumps(plain(said), allow_nan=False).encode()
    sizes = _SIZES.pack(_MAGIC, len(text), sum([part.size for part in numbers]))
    digest = _digest(previous, sizes, text, *numbers)
    head = sizes + digest
    return [head, zlib.crc32(head).to_bytes(4, "little"), text, *numbers], digest


def _digest(*parts: Any) -> bytes:
    hashed = hashlib.sha256()
    for part in parts:
        hashed.update(part)
    return hashed.digest()


def read_journal(run: Path, attempt: int, first_step: int) -> Journal | None:
    """Return what a journal holds up to its first damage; None if the file is missing."""
    path = journal_path(run, attempt, first_step)
    head: _Head | None = None
    records: list[StepRecord] = []
    try:
        with open_file(path) as file:
            for text, numbers in _frames(file):
                if head is None:
                    head = _read_head(parse_json(text))
                    if head.key != (attempt, first_step):
                        msg = f"its content is that of {journal_path(run, *head.key).name}"
                        raise DamageError(msg)
                else:
                    records += _read_steps(parse_json(text), numbers, head, records[-1:])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (MemoryError, OSError, ValueError, RecursionError) as error:
        advice = "to read the other steps, move it away, or pass skip_damaged=True to read_run"
        failed = file_error(path, summary(error), advice)
        return Journal(head and head.roster, records, failed, isinstance(error, (MemoryError, OSError)))
    return Journal(head and head.roster, records)


def _frames(file: IO[bytes]) -> Iterator[tuple[bytes, bytearray]]:
    """Return text and numbers of each whole frame.

    Raises:
        DamageError: for a frame that is not as it was written.
    """
    at, size, previous = 0, file.seek(0, 2), b""
    file.seek(0)
    while len(header := file.read(_HEADER)) == _HEADER:
        sizes, digest = header[: _SIZES.size], header[_SIZES.size : -4]
        if zlib.crc32(header[:-4]).to_bytes(4, "little") != header[-4:]:
            if not any(header) and not any(file.read(_BLOCK)) and file.tell() == size:
                return
            msg = f"there is no batch of steps at byte {at}"
            raise DamageError(msg)
        magic, text_size, numbers_size = _SIZES.unpack(sizes)
        if magic != _MAGIC:
            msg = f"there is no batch of steps at byte {at}"
            raise DamageError(msg)
        at += _HEADER + text_size + numbers_size
        if at > size:
            return
        text, numbers = file.read(text_size), bytearray(numbers_size)
        file.readinto(numbers)  # type: ignore[attr-defined]
        previous = _digest(previous, sizes, text, numbers)
        if previous != digest:
            msg = f"the batch of steps that ends at byte {at} does not match its digest"
            raise DamageError(msg)
        yield text, numbers


class _Head(NamedTuple):
    key: tuple[int, int]
    roster: Roster
    places: list[int]  # of this release's columns among the journal's
    further: list[int]  # of those of updates; empty without
    of_taps: list[int]  # of those of activations; empty without
    width: int


def _read_head(said: Any) -> _Head:
    try:
        columns = said["columns"]
        wanted = (*_COLUMNS, *FINGERPRINT_COLUMNS) if {*FINGERPRINT_COLUMNS} <= {*columns} else _COLUMNS
        places = [columns.index(name) for name in wanted]
        further = [columns.index(name) for name in UPDATE_NAMES] if {*UPDATE_NAMES} <= {*columns} else []
        of_taps = [columns.index(name) for name in TAP_NAMES] if {*TAP_NAMES} <= {*columns} else []
        attempt, first_step = operator.index(said["attempt"]), operator.index(said["first_step"])
        if not 0 <= attempt <= LARGEST_ATTEMPT:
            msg = f"attempt {attempt}"
            raise ValueError(msg)  # noqa: TRY301 as for other content
        return _Head((attempt, first_step), load_roster(said), places, further, of_taps, len(columns))
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        msg = f"unexpected content: {error!r:.80}"
        raise DamageError(msg) from None


def _read_steps(said: Any, numbers: bytearray, head: _Head, before: Sequence[StepRecord]) -> list[StepRecord]:
    roster, last = head.roster, before[-1].step if before else -1
    shape = len(roster.kinds), len(roster.names), head.width
    try:
        recorded = sum([entry[2] is True for entry in said])
        histograms = sum([entry[5][2] for entry in said if len(entry) > 5])
        if len(numbers) != 8 * recorded * math.prod(shape) + 16 * histograms:
            msg = f"{len(numbers)} bytes of numbers for {recorded} steps"
            raise ValueError(msg)  # noqa: TRY301 as for other content
        values = torch.empty((recorded, *shape), dtype=torch.float64, device="cpu")
        exponents = None
        if numbers:
            count = values.numel()
            words = torch.frombuffer(numbers, dtype=torch.int64)
            values = words[:count].view(torch.float64).view(-1, *shape)
            exponents = _histograms(said, words[count:], roster)
        further = None
        if head.further and "updates" in roster.kinds:
            further = iter(values[:, roster.place("updates")][..., head.further])
        tap_sums = None
        if head.of_taps and {*TAP_KINDS} <= {*roster.kinds}:
            tap_sums = iter(values[:, roster.place(TAP_KINDS[0]) :][..., head.of_taps])
        values = values[..., head.places]
        # tensors without elements are one: a text of a few bytes must not take a tensor for each step
        left = iter(values) if values.numel() else itertools.repeat(values[0] if recorded else None)
        records = []
        for step, time, is_recorded, skipped, scalars, *_ in said:
            if not (type(step) is int and last < step <= _LARGEST_STEP):
                msg = f"step {step!r:.20} after step {last}"
                raise ValueError(msg)  # noqa: TRY301
            last = step
            found = {name: float(x) for name, x in from_json(scalars).items()}
            kept = next(left) if is_recorded is True else None
            more = None if further is None or kept is None else next(further)
            of_taps = None if tap_sums is None or kept is None else next(tap_sums)
            record = StepRecord(step, float(time), found, roster, kept, bool(skipped), further=more)
            record = record if of_taps is None else replace(record, tap_sums=of_taps)
            found_exponents = (exponents or {}).get(step)
            records.append(record if found_exponents is None else replace(record, exponents=found_exponents))
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        msg = f"unexpected content: {error!r:.80}"
        raise DamageError(msg) from None
    return records


def _histograms(said: Any, words: Tensor, roster: Roster) -> dict[int, StepExponents]:
    """Return the histograms of the steps that have some; a ValueError if they are none."""
    names = roster.of_parameters.names
    found = {}
    for step, *_, (kinds, columns, count) in [entry for entry in said if len(entry) > 5]:
        cells = len(kinds) * len(names) * NUM_EXPONENT_COLUMNS
        if type(count) is not int or count < 0:
            msg = f"step {step!r:.20} has {count!r:.20} counts"
            raise ValueError(msg)
        fits = columns == NUM_EXPONENT_COLUMNS and {*kinds} <= {*roster.kinds} and len({*kinds}) == len(kinds)
        places, counts = words[:count].clone(), words[count : 2 * count].clone()
        words = words[2 * count :]
        if not fits or (counts <= 0).any() or (counts > _MOST).any():
            msg = f"step {step!r:.20} has no histograms"
            raise ValueError(msg)
        # limits first, lest differences overflow
        if count and not (int(places.min()) >= 0 and int(places.max()) < cells and (places.diff() > 0).all()):
            msg = f"step {step!r:.20} has counts outside of the bins"
            raise ValueError(msg)
        found[step] = StepExponents.of_places(tuple(kinds), names, places, counts)
    return found
