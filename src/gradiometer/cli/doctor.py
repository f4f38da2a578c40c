"""Check this machine: versions, devices, missing packages, problems."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from gradiometer import ops
from gradiometer.cli import devices
from gradiometer.cli.devices import Device, Problem
from gradiometer.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator

OLDEST_TORCH: Final = (2, 11)
_NVIDIA: Final = Path("/proc/driver/nvidia/version")
_NO_DRIVER: Final = "no driver"
# free bytes below which a folder has too little space
LEAST_FREE: Final = 2**30

# distribution -> the extra that installs it, and the feature that needs it
EXTRAS: Final = {
    "pyarrow": ("monitor", "run records"),
    "rich": ("monitor", "tables in a terminal"),
    "typer": ("monitor", "the command line"),
    "tensorboard": ("tensorboard", "the TensorBoard sink"),
    "wandb": ("wandb", "the Weights & Biases sink"),
    "mlflow-skinny": ("mlflow", "the MLflow sink"),
    "transformers": ("transformers", "the Hugging Face Trainer callback"),
    "accelerate": ("transformers", "the Hugging Face Trainer callback"),
    "pytorch-lightning": ("lightning", "the Lightning callback"),
    "pandas": ("frame", "to_frame()"),
    "matplotlib": ("plot", "plot()"),
    "safetensors": ("safetensors", "fingerprints of .safetensors files"),
}
# other distributions that also work
_INSTEAD: Final = {"mlflow-skinny": ("mlflow",), "pytorch-lightning": ("lightning",)}


@dataclass(frozen=True)
class Doctor:
    """The state of this machine.

    Attributes:
        versions: of gradiometer, Python, torch, CUDA, HIP and triton, and the platform; None if missing.
        devices: the devices, the CPU last.
        triton: the target of triton's driver, or why there is none.
        compiler: the C++ compiler that Inductor calls; None if there is none.
        trace_autograd_ops: whether torch has the flag that lets ``fullgraph=True`` trace ``backward()``.
        interpreted: whether ``TRITON_INTERPRET`` is set, so that kernels run as Python.
        packages: for each optional package its version or None, its extra, and the feature that needs it.
        run_dir, free: a folder for runs, and the free bytes there; None if none was given.
        problems: the problems found.
    """

    versions: dict[str, str | None]
    devices: list[Device]
    triton: str
    compiler: str | None
    trace_autograd_ops: bool
    interpreted: bool
    packages: dict[str, dict[str, str | None]]
    run_dir: str | None
    free: int | None
    problems: list[Problem]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {"healthy": not self.problems, **asdict(self)}


def examine(run_dir: Path | None = None) -> Doctor:
    """Check this machine, and a folder for runs that need not exist yet; takes seconds, for imports."""
    found, problems = devices.examine()
    versions = {
        "gradiometer": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "triton": _version("triton"),
        "platform": f"{platform.system()} {platform.machine()}",
    }
    packages: dict[str, dict[str, str | None]] = {}
    for package, (extra, use) in EXTRAS.items():
        present = (_version(name) for name in (package, *_INSTEAD.get(package, ())))
        packages[package] = {"version": next((v for v in present if v), None), "extra": extra, "use": use}
    facts = Doctor(
        versions=versions,
        devices=found,
        triton=_triton(),
        compiler=_compiler(),
        trace_autograd_ops=hasattr(importlib.import_module("torch._dynamo.config"), "trace_autograd_ops"),
        interpreted=ops.INTERPRETED,
        packages=packages,
        run_dir=None if run_dir is None else str(run_dir),
        free=None if run_dir is None else shutil.disk_usage(_existing(run_dir)).free,
        problems=problems,
    )
    return replace(facts, problems=[*problems, *_problems(facts)])


def _problems(facts: Doctor) -> Iterator[Problem]:
    """Yield the problems other than those of `devices.examine`."""
    version = str(facts.versions["torch"])
    if tuple(int(n) for n in version.split("+", 1)[0].split(".")[:2]) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        yield Problem(f"torch {version} is older than {oldest}", f"pip install 'torch>={oldest}'")
    elif not facts.trace_autograd_ops:
        what = "torch._dynamo.config has no trace_autograd_ops, so a fullgraph step cannot call backward()"
        yield Problem(what, "use torch.func.grad_and_value, or another version of torch")
    gpu = next((device.device for device in facts.devices if device.device != "cpu"), None)
    if gpu is None and _NVIDIA.exists():
        fix = "install a CUDA build of torch; if this is one, call torch.cuda.init() to see the error"
        yield Problem("there is an NVIDIA driver, but torch sees no GPU", fix)
    eager = "eager PyTorch, which is far slower"
    if gpu is not None and facts.versions["triton"] is None:
        yield Problem(f"without triton, tensors on {gpu} are read by {eager}", "pip install triton")
    elif gpu is not None and facts.triton.startswith(_NO_DRIVER):
        fix = "install the version of triton that torch requires, and the driver of the GPU; "
        what = f"triton has {facts.triton}, so tensors on {gpu} are read by {eager}"
        yield Problem(what, fix + ops.INSTALL_COMPILER)
    if facts.compiler is None:
        fix = "install g++ or clang, or set CXX; torch.compile(backend='aot_eager') works without one"
        yield Problem("there is no C++ compiler, which torch.compile needs", fix)
    if facts.interpreted:
        what = "TRITON_INTERPRET is set: kernels run as Python, thousands of times slower"
        yield Problem(what, "unset it, unless you are testing kernels")
    if facts.run_dir is not None and facts.free is not None:
        yield from _room(_existing(Path(facts.run_dir)), facts.free)
        if facts.packages["pyarrow"]["version"] is None:
            yield Problem("runs cannot be written without pyarrow", "pip install 'gradiometer[monitor]'")


def _room(folder: Path, free: int) -> Iterator[Problem]:
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        yield Problem(f"runs cannot be written in {folder}", "pass a folder that you can write to")
    if free < LEAST_FREE:
        fix = f"free at least {LEAST_FREE // 2**30} GiB there, or use another folder for runs"
        yield Problem(f"only {free / 2**20:,.0f} MiB are free in {folder}", fix)


def _existing(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    return next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())


def _triton() -> str:
    try:
        # only the kernels import triton; check that they can
        target = importlib.import_module("triton.runtime.driver").driver.active.get_current_target()
    except ModuleNotFoundError:
        return "triton is not installed"
    except Exception as error:  # noqa: BLE001 without a GPU, the driver may raise anything
        return f"{_NO_DRIVER} ({devices.first_line(error).rstrip('.')})"
    return f"{target.backend} {target.arch}"


def _compiler() -> str | None:
    named = os.environ.get("CXX")
    found = (shutil.which(name) for name in ([named] if named else ["g++", "clang++", "c++"]))
    return next((path for path in found if path), None)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
