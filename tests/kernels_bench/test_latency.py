"""The queueing model of loads in flight, against formulas for its special cases."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kernels_bench.machine_code import latency
from kernels_bench.machine_code.roofline import GPUS

H100 = next(gpu for gpu in GPUS if gpu.name == "H100")
ROW = {"registers": 64, "threads": 128, "shared": 32, "loads": {"16": 4}, "reads_ahead": False}
ROW |= {"elements": 16, "slots": 6.5, "fp64": 2.0, "conversions": 1.0}


@pytest.mark.parametrize(
    ("target", "registers", "threads", "shared", "blocks"),
    [
        ("sm_90", 64, 128, 32, 8),
        # allocated by eight
        ("sm_90", 65, 128, 32, 7),
        ("sm_90", 16, 128, 32, 16),
        ("sm_90", 16, 32, 32, 32),
        ("sm_89", 16, 128, 32, 12),
        ("sm_90", 64, 128, 48 * 1024, 4),
        ("sm_89", 64, 128, 48 * 1024, 2),
    ],
)
def test_blocks_share_registers_threads_and_shared_memory(target, registers, threads, shared, blocks):
    assert latency.blocks_of(target, registers, threads, shared) == blocks


def test_the_limits_of_each_nvidia_target_are_known():
    compiler = pytest.importorskip("kernels_bench.machine_code.compile")
    assert tuple(latency.LIMITS) == compiler.CUDA_TARGETS


def test_one_warp_waits_for_everything():
    assert latency.rate(1, [2.0, 3.0], 5.0) == pytest.approx(1 / 10)


@pytest.mark.parametrize("warps", [2, 8, 40])
def test_one_queue_is_as_busy_as_the_machine_repair_model_says(warps):
    # its utilization is 1 - B, with Erlang's loss formula
    blocked = 1.0
    for servers in range(1, warps + 1):
        blocked = 10 * blocked / (servers + 10 * blocked)
    assert latency.rate(warps, [0.5], 5.0) == pytest.approx((1 - blocked) / 0.5)


def test_many_warps_reach_what_the_slowest_queue_allows():
    assert latency.rate(400, [0.5, 0.2], 5.0) == pytest.approx(2.0)


def test_the_share_grows_with_the_loads_in_flight():
    found = latency.flight(H100, ROW)
    # eight blocks of four warps, 64 bytes a thread
    assert (found.blocks, found.loads) == (8, 8 * 4 * 32 * 64)
    fewer = latency.flight(H100, ROW | {"registers": 168})
    ahead = latency.flight(H100, ROW | {"registers": 168, "reads_ahead": True})
    assert 0 < fewer.share < ahead.share < found.share <= 1
    # as many loads cover less where the memory is faster
    assert latency.flight(replace(H100, bandwidth=2 * H100.bandwidth), ROW).share < found.share


def test_amd_gpus_have_no_figures():
    assert latency.flight(GPUS[-1], ROW) is None
