"""`gradiometer fingerprint`: the fingerprints of a checkpoint's tensors, and whether they are as stored."""

from __future__ import annotations

import re
import warnings
import zipfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from gradiometer import stats
from gradiometer.cli import tables
from gradiometer.extras import require
from gradiometer.runs import RunError, open_file, parse_json

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from rich.console import RenderableType

# characters of a value that are shown; the text of a tensor is shorter, unless it has many dimensions
_LONG: Final = 96
# a sparse tensor takes at most _LARGEST bytes of memory, or _RATIO times the size of the file
_LARGEST: Final = 1 << 30
_RATIO: Final = 100


def look(file: Path) -> dict[str, str]:
    """Return what `gradiometer.fingerprint` returns for the content of a file.

    It is a .safetensors file, or one of ``torch.save``, which is loaded with ``weights_only=True``.
    """
    content = _read_safetensors(file) if file.suffix == ".safetensors" else _read_torch(file)
    try:
        _check_sparse(content, file.stat().st_size)
        return stats.fingerprint(content if isinstance(content, dict | list | tuple) else [content])
    except RecursionError as error:
        raise RunError(f"{file} cannot be read: it is nested too deeply") from error
    except (TypeError, ValueError) as error:
        raise RunError(f"{file} cannot be read: {str(error).removeprefix('fingerprint: ')}") from error


def _check_regular(file: Path) -> None:
    """Refuse a pipe, whose opening would wait for a writer, and a device, which may have no end."""
    try:
        open_file(file).close()
    except OSError as error:
        if error.strerror:
            raise
        raise RunError(f"{file} cannot be read: {error}; pass a file on disk") from None


def _check_sparse(content: Any, size: int) -> None:
    """Refuse a sparse tensor whose dense form would not fit to the file, before it is allocated."""
    for name, x in stats.leaves("", content):
        if isinstance(x, torch.Tensor) and x.layout != torch.strided:
            dense = x.numel() * x.itemsize
            if dense > max(_LARGEST, _RATIO * size):
                msg = f"{name!r} is sparse and would take {dense >> 20} MiB, too many for {size} bytes on "
                raise ValueError(msg + "disk")


def _read_safetensors(file: Path) -> Any:
    reader = require("safetensors.torch", "safetensors", "Reading a .safetensors file")
    errors = require("safetensors", "safetensors", "Reading a .safetensors file").SafetensorError
    _check_regular(file)
    try:
        return reader.load_file(file, device="cpu")
    except errors as error:
        raise RunError(f"{file} cannot be read: {error}") from error


def _read_torch(file: Path) -> Any:
    _check_regular(file)
    with open_file(file) as opened:
        # files of torch before 1.6 are not archives, and cannot be mapped
        is_archive = zipfile.is_zipfile(opened)
    try:
        with warnings.catch_warnings():
            # that this is a TorchScript archive, which the error says too
            warnings.simplefilter("ignore", UserWarning)
            return torch.load(file, map_location="cpu", weights_only=True, mmap=is_archive)
    except OSError:
        raise
    except Exception as error:  # a damaged file makes torch.load raise anything
        raise RunError(
            f"{file} cannot be read with weights_only=True: {_reason(error)}; "
            "save a state dict that has only tensors, numbers and strings"
        ) from error


def _reason(error: Exception) -> str:
    """Return the first sentence of torch's reason."""
    reason = str(error).rpartition("WeightsUnpickler error: ")[2].strip()
    return re.split(r"\.\s|\n", reason)[0].rstrip(".") or type(error).__name__


def stored(file: Path) -> dict[str, str]:
    """Return fingerprints that were stored as JSON; raise RunError if the file holds anything else."""
    _check_regular(file)
    try:
        with open_file(file) as opened:
            found = parse_json(opened.read())
    except (ValueError, RecursionError) as error:
        raise RunError(f"{file} is not JSON: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(text, str) for text in found.values()):
        raise RunError(
            f"{file} does not map names to fingerprints; write it with gradiometer fingerprint FILE --json, "
            "or as the JSON of gm.fingerprint(...)"
        )
    return found


@dataclass(frozen=True)
class Check:
    """The names whose fingerprints are not as stored.

    Attributes:
        same: whether there are none.
        compared: the number of names in both.
        differing: in both, with different texts.
        missing: stored, but not in the file.
        added: in the file, but not stored.
    """

    same: bool
    compared: int
    differing: list[str]
    missing: list[str]
    added: list[str]


def check(found: Mapping[str, str], expected: Mapping[str, str]) -> Check:
    """Compare fingerprints with stored ones."""
    both = [name for name in found if name in expected]
    return Check(
        found == expected,
        len(both),
        differing=[name for name in both if found[name] != expected[name]],
        missing=[name for name in expected if name not in found],
        added=[name for name in found if name not in expected],
    )


def _whole(text: str) -> RenderableType:
    # a list of an optimizer's parameters may be long; digits continue on the next line of a narrow terminal
    shown = tables.text(text if len(text) <= _LONG else f"{text[:_LONG]}…")
    shown.overflow = "fold"
    return shown


def render(found: Mapping[str, str]) -> RenderableType:
    """Return a table of fingerprints."""
    table = tables.grid(["name", "dtype", ">shape", "digits"])
    for name, text in found.items():
        tensor = re.fullmatch(r"(\w+) (\(.*\)) ([0-9a-f]{32})", text)
        dtype, shape, digits = tensor.groups() if tensor else ("", "", text)
        table.add_row(tables.text(name), dtype, shape, _whole(digits))
    return table


def render_check(
    checked: Check, found: Mapping[str, str], expected: Mapping[str, str], file: Path, saved: Path
) -> RenderableType:
    """Return a line that says whether they are the same, and a table of those that are not."""
    if checked.same:
        return tables.text(f"{file}: ", (f"{checked.compared:,} entries as in {saved}", "green"))
    parts = {"differs": checked.differing, "missing": checked.missing, "added": checked.added}
    counts = [f"{len(names):,} {state}" for state, names in parts.items() if names]
    table = tables.grid(["", "name", "stored", "now"])
    for state, names in parts.items():
        for name in names:
            texts = [_whole(x.get(name, "-")) for x in (expected, found)]
            table.add_row(tables.text((state, "bold red")), tables.text(name), *texts)
    return tables.group(tables.text(f"{file} is not as in {saved}: ", (", ".join(counts), "bold red")), table)
