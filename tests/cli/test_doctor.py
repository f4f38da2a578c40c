"""The doctor lists the environment, and names each problem together with a remedy."""

from __future__ import annotations

import re
import shutil
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import gradiometer as gm
from conftest import INTERPRETED
from gradiometer.cli import devices, doctor

ROOT = Path(__file__).parents[2]
EXAMINE = devices.examine


@pytest.fixture(scope="module")
def healthy():
    """The facts about this machine, without any problem that it may have."""
    found = doctor.examine()
    return replace(found, compiler="/usr/bin/g++", interpreted=False, trace_autograd_ops=True, problems=[])


@pytest.fixture(autouse=True)
def _no_nvidia(monkeypatch, tmp_path, healthy):
    # examine the devices only once
    monkeypatch.setattr(devices, "examine", lambda: (healthy.devices, []))
    monkeypatch.setattr(doctor, "_NVIDIA", tmp_path / "none")


def problems(facts):
    return [problem.what for problem in doctor._problems(facts)]


def test_it_tells_versions_and_what_reads_the_cpu(healthy):
    assert healthy.versions["gradiometer"] == gm.__version__
    assert healthy.versions["torch"] == torch.__version__
    cpu = healthy.devices[-1]
    assert cpu.device == "cpu"
    assert cpu.works
    assert cpu.path == ("Triton kernels, interpreted" if INTERPRETED else "eager PyTorch")
    assert (cpu.gigabytes_per_second is None) == INTERPRETED
    assert healthy.trace_autograd_ops
    assert problems(healthy) == []


def test_every_package_is_one_that_an_extra_installs():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    installs = {extra: {re.split(r"[<>=\[;]", line)[0] for line in lines} for extra, lines in extras.items()}
    for package, (extra, use) in doctor.EXTRAS.items():
        assert package in installs[extra], package
        assert use
    wanted = "monitor tensorboard wandb mlflow transformers lightning frame plot safetensors"
    assert set().union(*(installs[extra] for extra in wanted.split())) == set(doctor.EXTRAS)


def test_a_missing_package_is_told_with_its_extra(monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda _: None)

    found = doctor.examine()

    assert found.packages["wandb"] == {"version": None, "extra": "wandb", "use": "the Weights & Biases sink"}
    assert found.to_dict()["packages"]["rich"]["extra"] == "monitor"


GPU = devices.Device("cuda:0", "H200", "Triton kernels", "1/2", 0.5, 2**37, True, 3000.0)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"versions": {"torch": "2.10.1+cu128", "triton": "3.5"}}, "torch 2.10.1+cu128 is older than 2.11"),
        ({"trace_autograd_ops": False}, "trace_autograd_ops"),
        ({"compiler": None}, "no C++ compiler"),
        ({"interpreted": True}, "TRITON_INTERPRET is set"),
        (
            {"devices": [GPU], "versions": {"torch": "2.11.0", "triton": None}},
            "without triton, tensors on cuda:0",
        ),
        (
            {"devices": [GPU], "triton": "no driver (Failed to find C compiler)"},
            "(Failed to find C compiler), so tensors on cuda:0 are read by eager PyTorch",
        ),
    ],
    ids=["torch", "flag", "compiler", "interpreter", "triton", "driver"],
)
def test_what_is_wrong_is_named_with_what_to_do(healthy, change, what):
    (problem,) = doctor._problems(replace(healthy, **change))

    assert what in problem.what
    assert problem.fix


def test_a_working_gpu_is_no_problem_and_one_that_torch_does_not_see_is(healthy, monkeypatch, tmp_path):
    versions = {"torch": "2.13.0", "triton": "3.7.1"}
    assert problems(replace(healthy, devices=[GPU], triton="cuda 90", versions=versions)) == []

    monkeypatch.setattr(doctor, "_NVIDIA", tmp_path)
    assert problems(healthy) == ["there is an NVIDIA driver, but torch sees no GPU"]


def test_a_folder_that_is_not_there_yet_has_the_room_of_the_one_above(healthy, tmp_path, monkeypatch):
    found = doctor.examine(tmp_path / "runs" / "mine")

    assert found.run_dir == str(tmp_path / "runs" / "mine")
    assert found.free > 0
    facts = replace(healthy, run_dir=found.run_dir, free=2**20, packages=found.packages)
    assert f"only 1 MiB are free in {tmp_path}" in problems(facts)
    monkeypatch.setattr(doctor.os, "access", lambda *_: False)
    assert f"runs cannot be written in {tmp_path}" in problems(replace(facts, free=2**40))
    none = {"pyarrow": {"version": None, "extra": "monitor", "use": "run records"}}
    assert "runs cannot be written without pyarrow" in problems(replace(facts, packages=none))


@pytest.mark.parametrize("named", [None, "no-such-compiler"])
def test_the_compiler_that_is_named_is_the_one_that_is_looked_for(named, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}" if name == "clang++" else None)
    if named:
        monkeypatch.setenv("CXX", named)
    assert doctor._compiler() == (None if named else "/bin/clang++")


# devices


@pytest.mark.parametrize(
    ("capability", "share", "says"),
    [
        ((8, 0), 1 / 2, "1/2 of fp32, 32 per clock"),
        ((7, 5), 1 / 32, "few, so"),
        ((8, 9), 1 / 64, "in fp32 with compensation"),
        ((9, 0), 1 / 2, "1/2 of fp32, 64 per clock"),
        ((99, 1), None, "unknown for compute capability 99.1"),
    ],
)
def test_the_fp64_rate_of_a_gpu(capability, share, says):
    text, found = devices.fp64_rate(capability)

    assert found == share
    assert says in text


def test_a_gpu_is_described_by_its_properties(monkeypatch):
    properties = SimpleNamespace(name="NVIDIA H200", total_memory=2**37, major=9, minor=0)
    module = SimpleNamespace(get_device_properties=lambda _: properties, is_available=lambda: False)
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    monkeypatch.setattr(devices, "_read_rate", lambda _: 3000.0)
    monkeypatch.setattr(torch.version, "hip", None)

    found = devices._device(torch.device("cuda", 0), works=True)

    assert (found.device, found.name, found.memory, found.fp64_share) == ("cuda:0", "NVIDIA H200", 2**37, 0.5)
    assert found.gigabytes_per_second == 3000.0
    assert devices._device(torch.device("cuda", 0), works=False).gigabytes_per_second is None


@pytest.mark.parametrize("wrong", ["raises", "lies"])
def test_a_device_where_a_collection_fails_is_a_problem(monkeypatch, wrong):
    def collect(tensors):
        if wrong == "raises":
            raise RuntimeError("no kernel image\nfor this device")
        return gm.collect([2 * tensors[0]])

    monkeypatch.setattr(devices, "collect", collect)
    monkeypatch.setattr(devices, "_read_rate", lambda _: 1.0)

    found, (problem, *_) = EXAMINE()

    assert not found[-1].works
    assert "no kernel image" in problem.what or "gives 10.0 as the norm of (3, 4)" in problem.what
    assert "\n" not in problem.what
