"""Check every file of a run against its digest."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from gradiometer.runs.files import RunError
from gradiometer.runs.format import list_segments, list_tables, segment_path
from gradiometer.runs.info import catalog_of, read_findings, read_info
from gradiometer.runs.journal import journal_path, list_journals, read_journal
from gradiometer.runs.json_files import read_with_digest
from gradiometer.runs.segments import Segments

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping

    from gradiometer.runs.digest import Claims

_State = Literal["whole", "no digest", "damaged", "missing"]
_JSON: Final = ("findings.json", "blackbox.json", "blackbox-[0-9]*.json", "blackbox.rank-*.json")


@dataclass(frozen=True)
class File:
    """One file of a run.

    Attributes:
        name: its path in the run's folder.
        state: ``"whole"``: it is as it was written; ``"no digest"``: it can be read, but was changed by hand,
            and its digest is null; ``"damaged"``; or ``"missing"``.
        reason: what is wrong, in one line; empty if nothing is.
    """

    name: str
    state: _State
    reason: str = ""


@dataclass(frozen=True)
class Verification:
    """The state of all files of a run, in the order run.json, segments, journals, other JSON files."""

    path: str
    files: tuple[File, ...]

    def of(self, *states: _State) -> list[File]:
        """Return the files in one of these states."""
        return [file for file in self.files if file.state in states]

    @property
    def whole(self) -> bool:
        """Whether no file is damaged or missing."""
        return not self.of("damaged", "missing")

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {"whole": self.whole, **asdict(self)}


def verify(path: Path | str) -> Verification:
    """Check every file of a run against its digest; a run that is still being written can be checked too.

    Raises:
        RunError: if there is no run.
    """
    path = Path(path)
    segments = list(list_segments(path))
    if not (path / "run.json").exists() and not segments:
        read_info(path)  # the error says what is there
    files = [_checked("run.json", partial(_of_info, path))]
    info = {} if files[0].state == "damaged" else read_info(path)
    files += _segments(path, segments, info)
    files += _journals(path)
    listed: Mapping[str, str] = info.get("files", {})
    for file in sorted(path.glob("*.json")):
        if any(map(file.match, _JSON)):
            files.append(_checked(file.name, partial(_of_json, file, listed.get(file.name))))
    found = {file.name for file in files}
    reason = "it was there when the run was closed"
    files += [File(name, "missing", reason) for name in listed if name not in found]
    return Verification(str(path), tuple(files))


def _checked(name: str, digest: Callable[[], object]) -> File:
    try:
        return File(name, "whole" if digest() is not None else "no digest")
    except RunError as error:
        return File(name, "damaged", error.reason or str(error))


def _of_info(path: Path) -> str | None:
    catalog_of(path, read_info(path))
    return read_with_digest(path / "run.json")[1]


def _of_json(file: Path, closed_with: str | None) -> str | None:
    digest = read_with_digest(file, closed_with)[1]
    if file.name == "findings.json":
        read_findings(file.parent)
    return digest


def _segments(path: Path, keys: list[tuple[int, int]], info: Mapping[str, Any]) -> Iterator[File]:
    catalog = catalog_of(path, info) if info else None
    segments, tables = Segments(path, keys, info, catalog), list_tables(path)
    for key in keys:
        claims = yield from _parquet(segments, "steps", key)
        if claims and claims.previous and claims.previous[:2] not in keys:
            before = segment_path(path, "steps", *claims.previous[:2])
            reason = f"it was there when {segment_path(path, 'steps', *key).name} was begun"
            yield File(f"steps/{before.name}", "missing", reason)
        found = [name for name in tables if segment_path(path, name, *key).exists()]
        for table in sorted({*found, *(claims.tables if claims else ())}):
            yield from _parquet(segments, table, key)
    # without a file of steps: readers leave them out
    for table in tables:
        for key in list_segments(path, table):
            if key not in keys:
                yield from _parquet(segments, table, key)


def _journals(path: Path) -> Iterator[File]:
    for key in list_journals(path):
        name, journal = journal_path(path, *key).name, read_journal(path, *key)
        if journal is not None:  # else it was replaced by Parquet files
            yield File(name, "damaged", journal.error.reason) if journal.error else File(name, "whole")


def _parquet(segments: Segments, table: str, key: tuple[int, int]) -> Generator[File, None, Claims | None]:
    path = segment_path(segments.run, table, *key)
    name = f"{table}/{path.name}"
    try:
        claims = segments.claims(table, key)
        segments.read(table, key)
    except RunError as error:
        yield File(name, "damaged" if path.exists() else "missing", error.reason or str(error))
        return None
    yield File(name, "whole")
    return claims
