"""The eager CPU path: how it splits tensors, its memory use, and its agreement with plain PyTorch."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path

import pytest
import torch

import gradiometer as gm
from gradiometer.columns import DEFAULT_THRESHOLDS, TENSORS, Flag, Thresholds
from gradiometer.ops import eager_plan, reference, reference_rows, streaming
from kernels_bench import scripts
from support.gradients import bit_patterns

LIMIT_MIB = 4.0


def awkward_tensors():
    n = streaming.piece_length()
    return {
        "below a piece": torch.randn(n - 1),
        "one piece": torch.randn(n),
        "a piece and an element": torch.randn(n + 1),
        "three pieces": torch.randn(3 * n - 7),
        "transposed": torch.randn(600, 700).t(),
        "every other column": torch.randn(700, 900)[:, ::2],
        "few long rows": torch.randn(3, 2 * n)[:, 1:],
        "expanded": torch.randn(1, 700).expand(900, 700),
        "one long row of many": torch.randn(2, 3, 4, n // 8)[:, 1],
    }


@pytest.mark.parametrize("name", awkward_tensors())
def test_pieces_cover_every_element_once_in_views_of_bounded_size(name):
    x = awkward_tensors()[name]
    pieces = list(reference_rows._pieces(x, streaming.piece_length()))
    assert all(piece.numel() <= streaming.piece_length() for piece in pieces)
    assert all(piece.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for piece in pieces)
    together = torch.cat([piece.reshape(-1) for piece in pieces]).sort().values
    assert torch.equal(together, x.reshape(-1).sort().values)


@pytest.mark.parametrize("name", awkward_tensors())
def test_long_and_strided_tensors_agree_with_plain_pytorch(name):
    x = awkward_tensors()[name]
    memory = x if x._base is None else x._base
    memory.view(-1)[::97] = 0
    columns, _, _ = reference.tensor_stats([x], DEFAULT_THRESHOLDS)
    row = dict(zip(TENSORS.index, columns[0].tolist(), strict=True))
    wide = x.double()
    assert row["numel"] == x.numel()
    assert row["n_zero"] == (x == 0).sum().item()
    assert row["abs_max"] == x.abs().max().item()
    # both use pairwise sums of fewer than 2**21 terms: 21 roundings of 2**-53 each
    assert row["sumsq"] == pytest.approx(wide.square().sum().item(), rel=2 * 21 * 2**-53)
    assert row["sum"] == pytest.approx(wide.sum().item(), abs=2 * 21 * 2**-53 * wide.abs().sum().item())


def test_zeros_nan_and_inf_are_counted_where_they_are():
    piece = streaming.piece_length()
    n = 2 * piece + 5
    x = torch.ones(n)
    x[[0, piece - 1, n - 1]] = torch.nan
    x[[1, piece, n - 2]] = torch.inf
    x[2] = -torch.inf
    x[[3, n - 3]] = torch.tensor([0.0, -0.0])
    columns, _, _ = reference.tensor_stats([x], DEFAULT_THRESHOLDS)
    finite = n - 9
    assert columns[0].tolist() == [n, finite, finite, 2, 3, 3, 1, 1]


def test_sums_of_doubles_that_overflow_are_infinite_and_raise_nothing():
    piece = streaming.piece_length()
    x = torch.full((3 * piece,), 1e308, dtype=torch.float64)
    x[piece:] *= -1
    columns, _, _ = reference.tensor_stats([x, x[:10]], DEFAULT_THRESHOLDS)
    row = dict(zip(TENSORS.index, columns[0].tolist(), strict=True))
    assert row["sumsq"] == torch.inf
    assert row["abs_max"] == 1e308
    assert row["n_nan"] == row["n_posinf"] == row["n_neginf"] == 0


# tests/test_cost.py measures the peak of larger tensors
@pytest.mark.deep
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from Linux's /proc")
def test_collection_grows_resident_memory_by_at_most_four_mebibytes(tmp_path):
    # in a fresh process: an earlier peak of this one would hide the growth
    started = {"args": scripts.command("kernels_bench", "--memory"), "env": scripts.environment()}
    output = subprocess.run(**started, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    grown = {case: by["ours-eager"] for case, by in json.loads(output).items()}
    assert len(grown) == 4
    assert all(mib <= LIMIT_MIB for mib in grown.values()), grown


def test_tensors_may_span_several_waves_of_blocks(monkeypatch):
    sizes = (10, 5000, 2 * streaming.piece_length(), 9 * streaming.piece_length() + 1, 7000)
    tensors = [torch.randn(size) for size in sizes]
    whole = reference.tensor_stats(tensors, DEFAULT_THRESHOLDS)[0], reference.sumsq(tensors)
    monkeypatch.setattr(streaming, "WAVE", 2)
    cut = reference.tensor_stats(tensors, DEFAULT_THRESHOLDS)[0], reference.sumsq(tensors)
    assert torch.equal(whole[0], cut[0])
    assert whole[1] == cut[1]
    assert whole[1] == pytest.approx(whole[0][:, TENSORS.index["sumsq"]].sum().item(), rel=1e-14)


def test_a_list_that_is_known_is_measured_by_its_plan_with_the_same_bits():
    tensors = [torch.randn(3, 5), torch.randn(7), torch.randn(16), torch.tensor(2.0), torch.zeros(0)]
    tensors += [torch.randn(2, 3, dtype=torch.float64).t(), torch.randn(9).bfloat16(), torch.randn(5000)]
    plan = eager_plan.plan_of(tensors)
    planned = reference.tensor_stats(tensors, DEFAULT_THRESHOLDS, None, plan)
    others = [torch.randn_like(x) for x in tensors]
    assert torch.equal(planned[0], reference.tensor_stats(tensors, DEFAULT_THRESHOLDS)[0])
    assert torch.equal(
        reference.tensor_stats(others, DEFAULT_THRESHOLDS, None, plan)[0],
        reference.tensor_stats(others, DEFAULT_THRESHOLDS)[0],
    )


def test_every_share_of_zeros_equal_to_the_threshold_is_dead():
    for numel in range(1, 150):
        for n_zero in range(1, numel + 1):
            row = (float(numel), 1.0, 0.0, float(n_zero), 0.0, 0.0, 0.0, 1.0)
            assert reference._flags([row], Thresholds(dead=n_zero / numel)) == [Flag.DEAD], row


def middle_sized(dtype):
    sizes = [8193, 32767, 8193, 20000, 8193, *[8193] * 16, 12345, 30000, eager_plan.MIDDLE, 50001]
    tensors = [torch.randn(size).to(dtype) for size in sizes]
    tensors.append(torch.randn(100, 200).to(dtype).t())
    tensors.append(torch.randn(150, 200).to(dtype)[::2, 1:])
    tensors[3][::7] = 0
    tensors[5][17] = math.nan
    tensors[7][:] = 0
    tensors[9][-3:] = torch.tensor([-math.inf, math.inf, 0])
    return tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_middle_sized_tensors_are_exact_with_the_same_bits_alone_and_together(dtype):
    tensors = middle_sized(dtype)
    together = reference.tensor_stats(tensors, DEFAULT_THRESHOLDS)[0].tolist()
    assert together == [reference.tensor_stats([x], DEFAULT_THRESHOLDS)[0].tolist()[0] for x in tensors]
    back = reference.tensor_stats(tensors[::-1], DEFAULT_THRESHOLDS)[0].tolist()
    assert back[::-1] == together
    for x, row in zip(tensors, together, strict=True):
        wide = x.double()
        finite = wide[wide.isfinite()]
        values = dict(zip(TENSORS.index, row, strict=True))
        assert values["sumsq"] == pytest.approx(math.fsum((finite * finite).tolist()), rel=1e-13)
        assert values["sum"] == pytest.approx(
            math.fsum(finite.tolist()), abs=1e-13 * finite.abs().sum().item()
        )
        assert values["abs_max"] == finite.abs().max().item()
        assert values["n_zero"] == (wide == 0).sum().item()
        assert values["n_nan"] == wide.isnan().sum().item()
        assert values["n_posinf"] == (wide == math.inf).sum().item()
        assert values["n_neginf"] == (wide == -math.inf).sum().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_zeros_after_a_row_change_no_bit_of_its_sums(dtype):
    # zero padding lets short tensors of several sizes share a batch
    tensors = [(torch.randn(size) * 10.0 ** (size % 30 - 15)).to(dtype) for size in range(2, 1025, 11)]
    for first in range(0, len(tensors), 7):
        few = tensors[first : first + 7]
        assert len(eager_plan.plan_of(few).groups) == 1
        together = reference.tensor_stats(few, DEFAULT_THRESHOLDS)[0].tolist()
        alone = [reference.tensor_stats([x], DEFAULT_THRESHOLDS)[0].tolist()[0] for x in few]
        assert together == alone
    # the widest rows that share a batch
    for x in tensors[::5]:
        pair = [x, torch.randn(4000).to(dtype)]
        assert len(eager_plan.plan_of(pair).groups) == 1
        together = reference.tensor_stats(pair, DEFAULT_THRESHOLDS)[0].tolist()
        assert together == [reference.tensor_stats([y], DEFAULT_THRESHOLDS)[0].tolist()[0] for y in pair]
    crowd = reference.tensor_stats(tensors * 40, DEFAULT_THRESHOLDS)[0].tolist()
    assert crowd[: len(tensors)] == [
        reference.tensor_stats([x], DEFAULT_THRESHOLDS)[0].tolist()[0] for x in tensors
    ]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("numel", [1, 16, 100, 1024, 5000, 9000, eager_plan.MIDDLE, eager_plan.MIDDLE + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_measuring_changes_no_tensor(count, numel, dtype):
    tensors = [torch.randn(numel).to(dtype) for _ in range(count)]
    before = [x.clone() for x in tensors]
    gm.collect(tensors)
    gm.compare(tensors, before)
    assert bit_patterns(tensors) == bit_patterns(before)
