"""The report of which tensors fit which format, if some have NaN or Inf, and how formats are chosen."""

from __future__ import annotations

import pytest
import torch

import gradiometer as gm

TENSORS = {
    "nan": torch.full((8,), torch.nan),
    "some": torch.tensor([1.0, torch.inf, torch.nan, -torch.inf]),
    "fine": torch.ones(3),
}


def test_a_tensor_without_finite_elements_fits_nothing():
    lines = str(gm.precision_report(TENSORS, ["float16"])).splitlines()
    assert lines[0].startswith(
        "3 tensors, 2 of them with NaN or Inf, 15 elements; tensors without loss: fp16 2"
    )
    (nan,) = [line for line in lines if line.startswith("nan")]
    (some,) = [line for line in lines if line.startswith("some")]
    assert nan.split()[3:] == ["-,", "8", "NaN", "-"]
    assert some.split()[3:] == ["0", "…", "0,", "1", "NaN,", "2", "Inf", "0"]


@pytest.mark.parametrize("formats", ["fp16", torch.float16, ["float16", "fp16", torch.float16]])
def test_a_format_may_be_given_alone_or_twice(formats):
    report = gm.precision_report(TENSORS, formats)
    assert report.formats == ("float16",)
    assert str(report).count("fp16 lost %") == 1


@pytest.mark.parametrize("q", ["x", None, torch.ones(2), -0.1, float("nan")])
def test_a_quantile_is_a_number_from_0_to_1(q):
    with pytest.raises(ValueError, match="pass a number from 0 to 1"):
        gm.collect_exponents(TENSORS).quantile(q)
