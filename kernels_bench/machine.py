"""Describe the machine and the versions that a measurement belongs to.

python -m kernels_bench.machine   # as JSON
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import torch

from kernels_bench.scripts import ROOT


def describe():
    """Return date, CPU, GPU (None without one), versions and commit as a dict that JSON can hold."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "system": platform.platform(terse=True),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": _gpu(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "python": platform.python_version(),
        "commit": _commit(),
    }


def one_line(machine):
    """Return the description as a line of text."""
    gpu = machine["gpu"]
    parts = [machine["date"]]
    if gpu:
        parts += [f"{gpu['name']}, {gpu['memory_gib']} GiB, driver {gpu['driver']}, CUDA {gpu['cuda']}"]
    parts += [machine["cpu"], f"{machine['cores']} cores, {machine['threads']} threads"]
    parts += [f"{name} {machine[name]}" for name in ("torch", "triton", "python") if machine[name]]
    parts += [f"commit {machine['commit']}"] if machine["commit"] else []
    return "; ".join(parts)


def _cpu():
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.+)", info.read_text(encoding="utf-8")) if info.exists() else None
    # on other architectures /proc/cpuinfo has no model name
    return found[1].strip() if found else platform.processor() or platform.machine()


def _gpu():
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties()
    return {
        "name": properties.name,
        "driver": _driver(),
        "cuda": torch.version.cuda or torch.version.hip,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "multiprocessors": properties.multi_processor_count,
        "l2_mib": round(properties.L2_cache_size / 2**20, 1),
    }


def _driver():
    tool = shutil.which("nvidia-smi")
    answer = _output(tool, "--query-gpu=driver_version", "--format=csv,noheader") if tool else None
    return answer.splitlines()[0] if answer else None


def _version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit():
    """Return the commit, with a + if sources differ from it; None outside of a clone."""
    git = shutil.which("git")
    commit = _output(git, "-C", str(ROOT), "rev-parse", "--short=12", "HEAD") if git else None
    if not commit:
        return None
    return commit + (
        "+" if _output(git, "-C", str(ROOT), "status", "--porcelain", "src", "kernels_bench") else ""
    )


def _output(*command):
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ended.stdout.strip() if ended.returncode == 0 else None


if __name__ == "__main__":
    print(json.dumps(describe(), indent=2))
