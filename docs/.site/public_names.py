"""The public names of gradiometer by purpose, and where each one is defined.

Sources are parsed, never imported: the site is built without torch.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]

# a test compares these with `gradiometer.__all__`
GROUPS = {
    "Measure": ("collect_grads", "collect_weights", "collect", "grad_norm", "total_norm"),
    "Results": (
        "TensorStats",
        "Report",
        "TensorReport",
        "ModuleReports",
        "Pending",
        "materialize",
        "materialize_async",
        "group_ratio",
        "EMA",
        "Smoothed",
    ),
    "Columns and flags": (
        "COLUMNS",
        "Flag",
        "Thresholds",
        "DEFAULT_VANISHING_THRESHOLD",
        "DEFAULT_EXPLODING_THRESHOLD",
        "DEFAULT_DEAD_THRESHOLD",
    ),
    "Updates and pairs": (
        "Snapshot",
        "collect_updates",
        "compare",
        "PairStats",
        "PairReport",
        "PairRow",
        "PAIR_COLUMNS",
    ),
    "Activations": (
        "Taps",
        "tap",
        "tap_attention",
        "tap_router",
        "ActivationStats",
        "ActivationReport",
        "ActivationRow",
        "ACTIVATION_COLUMNS",
    ),
    "Precision": (
        "collect_exponents",
        "collect_projections",
        "precision_report",
        "ExponentStats",
        "ProjectionStats",
        "PrecisionReport",
        "PrecisionRow",
        "FormatFit",
        "block_losses",
        "BlockLosses",
    ),
    "Fingerprints": (
        "fingerprint",
        "Fingerprint",
        "check_deterministic",
        "check_replicas",
    ),
    "Clipping": (
        "clip_grad_norm_",
        "collect_and_clip_",
        "clip_coefficient",
        "clip_grads_with_norm_",
        "clip_grad_value_",
        "ElementCounts",
        "ZScoreClip",
        "PerTensorClip",
        "WeightNormClip",
    ),
    "Batch size": ("NoiseScale", "GradientAgreement", "GradientCosines"),
    "Parametrization": ("coord_check", "CoordCheck", "CoordRow"),
    "Finiteness and AMP": (
        "check_finite",
        "FiniteReport",
        "locate_nonfinite",
        "inverse_scale",
        "share_found_inf_",
    ),
    "Models": ("check_model", "ModelReport", "check_gradients", "save_reference", "GradientReport"),
    "Recording": ("watch", "Monitor", "Recorder", "StepRecord", "Finding", "Severity"),
    "Runs": ("read_run", "Run", "RunError", "compare_runs", "load_kept_step", "write_page"),
    "Ranks": ("Ranks", "RankError"),
    "Rules": ("rules",),
    "Sinks": ("sinks",),
    "Version": ("__version__",),
}
# both classes have the same name
CALLBACKS = {
    "gradiometer.integrations.huggingface": "MonitorCallback",
    "gradiometer.integrations.lightning": "MonitorCallback",
}


class Entry(NamedTuple):
    """A page of the reference."""

    group: str
    # as users write it: gm.collect_grads
    shown: str
    # where it is defined: gradiometer.stats.collect.collect_grads
    path: str
    # the first sentence of its docstring
    summary: str

    @property
    def title(self) -> str:
        """The short name, for the navigation."""
        if self.group == "Callbacks":
            return self.path.split(".")[-2]
        return self.shown.rpartition(".")[2]

    @property
    def page(self) -> str:
        """The file of the page, below ``reference/``."""
        name = self.shown.removeprefix("gradiometer.").removeprefix("gm.")
        return f"api/{name.strip('_') if name == '__version__' else name}.md"

    @property
    def is_package(self) -> bool:
        """Whether the entry is a package of public names."""
        return self.shown in {"gm.rules", "gm.sinks"}


@cache
def entries() -> tuple[Entry, ...]:
    """Return an entry for each public name, for each class of `rules` and `sinks`, and for the callbacks."""
    found = []
    for group, names in GROUPS.items():
        found += [_entry(group, "gradiometer", name, f"gm.{name}") for name in names]
        if group in {"Rules", "Sinks"}:
            package = f"gradiometer.{group.lower()}"
            inner = [_entry(group, package, name, f"gm.{group.lower()}.{name}") for name in exported(package)]
            paths = {entry.path for entry in found}
            found += [entry for entry in inner if entry.path not in paths and _is_for_users(entry)]
    for module, name in CALLBACKS.items():
        found.append(_entry("Callbacks", module, name, f"{module}.{name}"))
    return tuple(found)


def exported(module: str) -> tuple[str, ...]:
    """Return ``__all__`` of a module."""
    for node in _tree(module).body:
        if "__all__" in _assigned(node):
            return tuple(ast.literal_eval(node.value))  # type: ignore[attr-defined]
    return ()


def defined(module: str, name: str) -> tuple[str, ast.AST]:
    """Return the path where a name of a module is defined, through all imports, and its node."""
    found = None
    body = _tree(module).body
    # gradiometer itself imports its names in an `if`
    inner = [node for part in body if isinstance(part, ast.If) for node in part.body]
    for node in [*body, *inner]:
        if isinstance(node, ast.ImportFrom) and node.module:
            if name in {alias.asname or alias.name for alias in node.names}:
                path = f"{node.module}.{name}"
                return (path, _tree(path)) if _path(path).is_dir() else defined(node.module, name)
        elif getattr(node, "name", None) == name or name in _assigned(node):
            # the last of several overloads is the implementation
            found = f"{module}.{name}", node
    if found is None:
        msg = f"{module} has no {name}: public_names.py lists it"
        raise LookupError(msg)
    return found


def _entry(group: str, module: str, name: str, shown: str) -> Entry:
    path, node = defined(module, name)
    text = _docstring(path.rpartition(".")[0], node)
    return Entry(group, shown, path, " ".join(text.partition("\n\n")[0].split()))


def _docstring(module: str, node: ast.AST) -> str:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.Module):
        return ast.get_docstring(node) or ""
    # the docstring of a constant is the string that follows it
    body = _tree(module).body
    after = body[body.index(node) + 1 :][:1]  # type: ignore[arg-type]
    value = after[0].value if after and isinstance(after[0], ast.Expr) else None
    return str(value.value) if isinstance(value, ast.Constant) else ""


def _is_for_users(entry: Entry) -> bool:
    module, _, name = entry.path.rpartition(".")
    return name == "default_rules" or isinstance(defined(module, name)[1], ast.ClassDef)


def _assigned(node: ast.AST) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _path(module: str) -> Path:
    return ROOT.joinpath("src", *module.split("."))


@cache
def _tree(module: str) -> ast.Module:
    path = _path(module)
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8"))
