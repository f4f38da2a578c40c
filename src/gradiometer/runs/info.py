"""What run.json and findings.json say of a run, after it is checked, and the catalog."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gradiometer.recorder import KINDS, Catalog, Rows, is_alike, kinds_of
from gradiometer.rules import Finding, checked
from gradiometer.runs.files import RunError, unfit
from gradiometer.runs.format import FINGERPRINTS, FORMAT, LARGEST_ATTEMPT, ROW, STEPS, TABLE_NAME, VERSION
from gradiometer.runs.json_files import encodable, read_json

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def read_info(path: Path) -> dict[str, Any]:
    """Return run.json, after checking its version and the fields that every reader needs."""
    info: dict[str, Any] | None = read_json(path / "run.json")
    if info is None:
        there = "it is a file, not a folder" if path.exists() else "there is no such folder"
        reason = "there is no run.json in it" if path.is_dir() else there
        inner = next(path.glob("*/run.json"), None)
        advice = (
            "the run_dir of a Monitor" if inner is None else f"one of the runs in it, such as {inner.parent}"
        )
        raise RunError(f"{path} is not a run: {reason}; pass {advice}")
    if not isinstance(info, dict) or info.get("format") != FORMAT:
        msg = f"{path / 'run.json'} does not have the format {FORMAT}: pass the run_dir of a Monitor"
        raise RunError(msg)
    version, attempts, files = info.get("version"), info.get("attempts", []), info.get("files", {})
    if isinstance(version, int) and version > VERSION:
        msg = f"{path} is a run of version {version}, but this gradiometer reads only up to {VERSION}: "
        raise RunError(msg + "pip install -U gradiometer")
    fits = {
        "version": isinstance(version, int),
        "created": isinstance(info.get("created", 0.0), (int, float)),
        "attempts": isinstance(attempts, list)
        and all([isinstance(x, dict) and isinstance(x.get("attempt"), int) for x in attempts])
        and all([0 <= x["attempt"] < LARGEST_ATTEMPT for x in attempts])
        and all([isinstance(x.get(name, 0), int) for x in attempts for name in ("first_step", "lost")]),
        "versions": isinstance(info.get("versions", {}), dict),
        "files": isinstance(files, dict) and all([isinstance(x, str) for x in files.values()]),
    }
    if wrong := [key for key, fit in fits.items() if not fit]:
        shown = ", ".join([f"{key}: {info.get(key)!r:.40}" for key in wrong])
        raise unfit(path / "run.json", shown)
    return info


def catalog_of(path: Path, info: Mapping[str, Any]) -> Catalog:
    """Return the catalog of run.json; raise RunError if it is not one."""
    try:
        return load_catalog(info["catalog"])
    except (KeyError, ValueError) as error:
        raise unfit(path / "run.json", repr(error)) from None


def load_catalog(values: Any) -> Catalog:
    """Return the catalog of run.json or of a journal; raise ValueError for anything else."""
    try:
        found = checked_catalog(Catalog.from_dict(values))
        # rules and views ask for derived values of gradients, and of other kinds that they know
        odd = [
            kind.name
            for kind in found.kinds.values()
            if kind.name in KINDS
            and not is_alike(kind, KINDS[kind.name])
            and KINDS[kind.name].measure is None
        ]
        if odd or "grads" not in found.kinds:
            raise ValueError(f"kind {odd[0]} is another one" if odd else "there is no kind grads")  # noqa: TRY301 as for other content
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        msg = f"catalog: {error!s:.80}" if isinstance(error, ValueError) else f"catalog: {error!r:.80}"
        raise ValueError(msg) from None
    return found


def checked_catalog(catalog: Catalog) -> Catalog:
    """Return a catalog; raise ValueError for one whose names cannot be those of folders and of columns."""
    schemas = {kind.schema.name: kind.schema for kind in catalog.kinds.values()}
    own = {field.name for field in (*ROW, *FINGERPRINTS)} | {"flags"}
    for name in catalog.kinds:
        if f"{name}_norm" in {field.name for field in STEPS}:
            raise ValueError(f"kind {name!r:.40}: the table of steps has a column {name}_norm")
    for name, schema in schemas.items():
        problem = ""
        if not TABLE_NAME.fullmatch(name) or name == "steps":
            problem = "a name has letters, digits and underscores, and is not steps"
        elif any([kind.schema is not schema for kind in catalog.kinds.values() if kind.schema.name == name]):
            problem = "there are two of this name"
        elif schema.storage == "columns" and own & {*schema.index}:
            problem = f"no column may have the name {min(own & {*schema.index})}"
        if problem:
            raise ValueError(f"schema {name!r:.40}: {problem}")
    return catalog


def merged_catalog(catalog: Catalog, old: Catalog | None) -> Catalog:
    """Return the catalog for run.json: these rows, then those that only earlier attempts had.

    Raise ValueError if a schema of earlier attempts has another one's name.
    """
    names = [encodable(name) for name in catalog.names]
    taps = [encodable(name) for name in catalog.taps.names]
    shapes, dtypes, kinds = [*catalog.parameters.shapes], [*catalog.parameters.dtypes], dict(catalog.kinds)
    if old is not None:
        known = {*names, *taps}
        for name, shape, dtype in zip(old.names, old.parameters.shapes, old.parameters.dtypes, strict=True):
            if name not in known:
                names.append(name)
                shapes.append(shape)
                dtypes.append(dtype)
        taps += [name for name in old.taps.names if name not in known]
        schemas = {kind.schema.name: kind.schema for kind in kinds.values()}
        for name, kind in old.kinds.items():
            schema = schemas.get(kind.schema.name)
            if schema is not None and schema.stores_the_same(kind.schema):
                kinds.setdefault(name, replace(kind, schema=schema))
            kinds.setdefault(name, kind)
    parameters = Rows(tuple(names), tuple(shapes), tuple(dtypes))
    return checked_catalog(Catalog(parameters, kinds_of(kinds.values()), Rows(tuple(taps))))


def read_findings(path: Path, closed_with: str | None = None) -> list[dict[str, Any]]:
    """Return the findings of findings.json; each finding has the attempt that saw it last."""
    content = read_json(path / "findings.json", closed_with)
    if content is None:
        return []
    found = content.get("findings")
    keys = {"attempt", "rule", "kind", "tensor", "first_step", "last_step", "value", "threshold"}
    steps = ("attempt", "first_step", "last_step")
    if (
        not isinstance(found, list)
        or not all([isinstance(x, dict) and keys <= x.keys() for x in found])
        or not all([isinstance(x[name], int) for x in found for name in steps])
    ):
        raise unfit(path / "findings.json", f"{content!r:.40}")
    try:
        for values in found:
            finding_of(values)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise unfit(path / "findings.json", repr(error)) from None
    return found


def finding_of(values: Mapping[str, Any]) -> Finding:
    """Return a finding of findings.json; raise TypeError or another error if it is not one."""
    numbers = {name: float(values[name]) for name in ("value", "threshold")}
    return checked(Finding.from_dict({k: x for k, x in values.items() if k != "attempt"} | numbers))
