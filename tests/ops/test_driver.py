"""On a GPU machine where Triton cannot build its driver, eager PyTorch measures, after one warning."""

from __future__ import annotations

import importlib
import warnings

import pytest
import torch
from torch import Tensor

import gradiometer as gm
from gradiometer.cli import devices, doctor
from gradiometer.ops import dispatch, ring

kernels = pytest.importorskip("gradiometer.kernels", reason="needs triton")

CUDA = torch.device("cuda")


@pytest.fixture
def _no_compiler(monkeypatch, tmp_path):
    """A machine with a GPU, and neither a C compiler nor a driver that was built earlier."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    # looked for before the compiler
    monkeypatch.setenv("TRITON_LIBCUDA_PATH", str(tmp_path))
    # Triton's own object, which has not made a driver yet
    monkeypatch.setattr(kernels.driver, "driver", type(kernels.driver.driver)())
    dispatch.driver_error.cache_clear()
    yield
    dispatch.driver_error.cache_clear()


@pytest.mark.usefixtures("_no_compiler")
def test_without_a_c_compiler_one_warning_names_the_cure():
    with pytest.warns(UserWarning, match="Triton cannot build its driver") as warned:
        assert not dispatch.uses_kernels(CUDA)
    text = str(warned[0].message)
    assert "(Failed to find C compiler" in text
    assert "apt-get install gcc" in text
    assert "eager PyTorch" in text
    with warnings.catch_warnings(action="error"):
        assert not dispatch.uses_kernels(CUDA)


@pytest.mark.usefixtures("_no_compiler")
def test_the_doctor_names_it_and_does_not_warn(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(devices, "_problem", lambda device: str(dispatch.uses_kernels(device)))
    monkeypatch.setattr(devices, "_device", lambda device, works: (device, works))
    with warnings.catch_warnings(action="error"):
        devices.examine()
    # Triton's own object, which has not made a driver here either
    monkeypatch.setattr(importlib.import_module("triton.runtime.driver"), "driver", kernels.driver.driver)
    assert doctor._triton().startswith("no driver (Failed to find C compiler")


def test_a_driver_that_was_built_launches_kernels(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(kernels, "load_driver", object)
    dispatch.driver_error.cache_clear()
    assert dispatch.uses_kernels(CUDA)
    dispatch.driver_error.cache_clear()


class Away(Tensor):
    """A tensor in memory that the host cannot read, except through a copy."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda _: CUDA)

    def cpu(self):
        return self.as_subclass(Tensor).clone()

    def data_ptr(self):
        raise AssertionError("read on the host")


def test_a_ring_on_a_device_without_kernels_is_written_through_the_host():
    model = torch.nn.Linear(3, 2)
    here, away = gm.Recorder(model, capacity=2, weights=True), gm.Recorder(model, capacity=2, weights=True)
    buffers = [away.ring.as_subclass(Away), away.cursor.as_subclass(Away)]
    for step in range(3):
        for p in model.parameters():
            p.grad = torch.full_like(p, 1.0 + step)
        stats = gm.collect([p.grad for p in model.parameters()] + list(model.parameters()))
        for ring_, cursor in ((here.ring, here.cursor), buffers):
            ring.append_in_eager(
                stats.columns, stats.flags, 2, ring_, cursor, here.layout.adjacent("grads", 2)
            )
        here.advance()
        away.advance()
    assert torch.equal(here.ring, away.ring)
    assert torch.equal(here.cursor, away.cursor)
    assert [record.step for record in away.read()] == [1, 2]
