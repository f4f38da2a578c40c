"""What gradiometer finds on this machine: versions, devices, what is missing, what is wrong."""

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

__all__ = ["EXTRAS", "Doctor", "examine"]

OLDEST_TORCH: Final = (2, 11)
_NVIDIA: Final = Path("/proc/driver/nvidia/version")
_NO_DRIVER: Final = "no driver"
# bytes in which a run has little room
LEAST_FREE: Final = 2**30

# distribution -> the extra that installs it, and what it is for
EXTRAS: Final = {
    "pyarrow": ("monitor", "run records"),
    "plotly": ("monitor", "the report page"),
    "rich": ("monitor", "tables in a terminal"),
    "typer": ("monitor", "the command line"),
    "tensorboard": ("tensorboard", "the TensorBoard sink"),
    "wandb": ("wandb", "the Weights & Biases sink"),
    "mlflow-skinny": ("mlflow", "the MLflow sink"),
    "transformers": ("transformers", "the Hugging Face Trainer callback"),
    "accelerate": ("transformers", "the same"),
    "pytorch-lightning": ("lightning", "the Lightning callback"),
    "pandas": ("frame", "to_frame()"),
}
# other distributions that do as well
_INSTEAD: Final = {"mlflow-skinny": ("mlflow",), "pytorch-lightning": ("lightning",)}


@dataclass(frozen=True)
class Doctor:
    """All that was found.

    Attributes:
        versions: of gradiometer, Python, torch, triton and the platform; None: not there.
        devices: the CPU last.
        triton: what triton's driver says: its target, or why there is none.
        compiler: the C++ compiler that Inductor and triton call; None: there is none.
        trace_autograd_ops: whether torch has the flag that lets ``fullgraph=True`` trace ``backward()``.
        interpreted: whether ``TRITON_INTERPRET`` is set: kernels run as Python then.
        packages: of each optional package its version or None, its extra and what it is for.
        run_dir, free: a folder for runs, and the bytes that are free there; None if none was given.
        problems: what is wrong.
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
    """Look at this machine; takes a few seconds, most of them imports.

    Args:
        run_dir: a folder for runs, which need not be there yet.
    """
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
    """Go over what is wrong, apart from devices that do not work."""
    version = str(facts.versions["torch"])
    if tuple(int(n) for n in version.split("+", 1)[0].split(".")[:2]) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        yield Problem(f"torch {version} is older than {oldest}", f"pip install 'torch>={oldest}'")
    elif not facts.trace_autograd_ops:
        what = "torch._dynamo.config has no trace_autograd_ops: no backward() inside a fullgraph step"
        yield Problem(what, "use torch.func.grad_and_value, or another version of torch")
    gpu = next((device.device for device in facts.devices if device.device != "cpu"), None)
    if gpu is None and _NVIDIA.exists():
        fix = "install a build of torch for CUDA; if it is one, torch.cuda.init() says what it lacks"
        yield Problem("there is an NVIDIA driver, but torch sees no GPU", fix)
    if gpu is not None and facts.versions["triton"] is None:
        yield Problem(f"without triton {gpu} is read by eager PyTorch, far slower", "pip install triton")
    elif gpu is not None and facts.triton.startswith(_NO_DRIVER):
        fix = "see that triton is the version that torch asks for, and the GPU's driver is installed"
        yield Problem(f"{gpu}: triton has {facts.triton}", fix)
    if facts.compiler is None:
        fix = "install g++ or clang, or set CXX; torch.compile(backend='aot_eager') needs none"
        yield Problem("no C++ compiler: torch.compile and triton call one", fix)
    if facts.interpreted:
        what = "TRITON_INTERPRET is set: kernels run as Python, thousands of times slower"
        yield Problem(what, "unset it, unless it is kernels that you test")
    if facts.run_dir is not None and facts.free is not None:
        yield from _room(_existing(Path(facts.run_dir)), facts.free)
        if facts.packages["pyarrow"]["version"] is None:
            yield Problem("no run can be written without pyarrow", "pip install 'gradiometer[monitor]'")


def _room(folder: Path, free: int) -> Iterator[Problem]:
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        yield Problem(f"no run can be written in {folder}", "give a folder that you may write to")
    if free < LEAST_FREE:
        fix = f"make room, or put runs elsewhere: {LEAST_FREE // 2**30} GiB is little enough"
        yield Problem(f"{free / 2**20:,.0f} MiB are free in {folder}", fix)


def _existing(folder: Path) -> Path:
    """Return the folder, or the nearest above it that exists."""
    return next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())


def _triton() -> str:
    try:
        # only the kernels import triton; this looks whether they could
        target = importlib.import_module("triton.runtime.driver").driver.active.get_current_target()
    except ModuleNotFoundError:
        return "triton is not installed"
    except Exception as error:  # noqa: BLE001 the driver fails in its own ways where there is no GPU
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
