"""What the kernels compile to, for devices that nobody needs to have.

The speed of a kernel that streams through memory is decided by few things that can be read in its
main loop: how wide the loads are, how many instructions an element costs, and whether threads wait
for each other. Here they are held for every target and dtype.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from gradiometer import ops, pack
from gradiometer.schema import Thresholds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytest.importorskip("triton")
if ops._INTERPRETED:
    pytest.skip("interpreted kernels have no machine code", allow_module_level=True)
if os.name != "posix" or os.uname().machine != "x86_64":
    pytest.skip("triton brings its disassembler for x86-64 Linux", allow_module_level=True)

from machine_code import (
    CUDA_TARGETS,
    HIP_TARGETS,
    TARGETS,
    Code,
    Launch,
    Loop,
    flushes_subnormals,
    is_atomic,
    is_talk,
    launches_of,
    load_size,
    parse_amdgcn,
    parse_sass,
)

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

# Instructions per element of the main loop, a bit above what triton 3.6, 3.7 and 3.9 make of it: one
# more instruction per element fails. A change that needs fewer should lower its bound.
BOUNDS = {
    #          fp64, fp32, bf16, fp16
    "sm_80": (16.0, 10.4, 13.5, 10.2),
    "sm_90": (15.8, 10.4, 11.7, 10.2),
    "sm_100": (16.0, 10.8, 11.6, 10.2),
    "gfx942": (10.6, 10.3, 10.5, 10.6),
}
# four blocks of 128 threads, 16 warps, share the 65536 registers of an SM; three waves the 512 of a
# lane, which triton 3.9 needs for fp64 only
MAX_REGISTERS = {"sm_80": 128, "sm_90": 128, "sm_100": 128, "gfx942": 168}

every_target = pytest.mark.parametrize("target", TARGETS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    # neither what the user's cache holds nor how it is configured is tested
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("TRITON_")]:
            patch.delenv(name)
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def moments_launch(dtype: torch.dtype, target: str = "sm_90") -> Launch:
    return launches_of([torch.zeros(9, dtype=dtype)], target=target)[0]


def finalize_launch(inv_scale: torch.Tensor | None = None) -> Launch:
    return launches_of([torch.zeros(9)], inv_scale=inv_scale)[-1]


@pytest.fixture(scope="module")
def moments() -> Callable[[str, torch.dtype], Code]:
    """Compile the moments kernel once for each target and dtype."""
    made: dict[tuple[str, torch.dtype], Code] = {}

    def code(target: str, dtype: torch.dtype) -> Code:
        if (target, dtype) not in made:
            made[target, dtype] = moments_launch(dtype, target).compile(target)
        return made[target, dtype]

    return code


def instructions_per_element(loop: Loop, dtype: torch.dtype) -> float:
    return len(loop.opcodes) / loop.elements(dtype.itemsize)


# the moments kernel


@every_target
@every_dtype
def test_the_main_loop_loads_16_bytes_at_a_time(moments, target, dtype):
    loop = moments(target, dtype).main_loop
    assert loop.narrow_loads == []


@every_target
@every_dtype
def test_threads_do_not_wait_for_each_other_in_the_main_loop(moments, target, dtype):
    assert moments(target, dtype).main_loop.talk == []


@every_target
@every_dtype
def test_an_element_costs_no_more_instructions_than_recorded(moments, target, dtype):
    loop = moments(target, dtype).main_loop
    cost = instructions_per_element(loop, dtype)
    bound = BOUNDS[target][DTYPES.index(dtype)]
    assert cost <= bound, f"{cost} instructions per element, at most {bound} until now: {loop}"


@every_target
@every_dtype
def test_each_element_is_converted_once_and_takes_two_fp64_operations(moments, target, dtype):
    loop = moments(target, dtype).main_loop
    elements = loop.elements(dtype.itemsize)
    assert loop.conversions == (0 if dtype == torch.float64 else elements)
    assert loop.fp64_arithmetic == 2 * elements
    if dtype != torch.float64:
        assert loop.fp64_comparisons == 0
    elif target in CUDA_TARGETS:
        # largest magnitude, and zero or not
        assert loop.fp64_comparisons == 2 * elements


@every_target
@every_dtype
def test_nothing_is_spilled(moments, target, dtype):
    code = moments(target, dtype)
    assert code.stack == 0
    assert code.registers <= MAX_REGISTERS[target]


@every_target
@every_dtype
def test_the_moments_are_deterministic_and_keep_subnormals(moments, target, dtype):
    code = moments(target, dtype)
    # the order of atomic additions is not fixed
    assert [opcode for opcode in code.opcodes if is_atomic(opcode)] == []
    # a subnormal that is read as 0 would be counted as one
    assert [opcode for opcode in code.opcodes if flushes_subnormals(opcode)] == []
    if target in HIP_TARGETS:
        modes = re.findall(r"\.amdhsa_float_denorm_mode_\w+ (\d)", code.text)
        assert modes == ["3", "3"]


# the finalize kernel


@every_target
@pytest.mark.parametrize("scaled", [False, True])
def test_the_finalize_kernel_takes_thresholds_in_fp64(target, scaled):
    launch = finalize_launch(torch.ones((), dtype=torch.float64) if scaled else None)
    code = launch.compile(target)
    # their bits, which no launcher and no interpreter rounds
    thresholds = [code.signature[name] for name in ("vanishing", "exploding", "dead")]
    assert thresholds == ["i64"] * 3
    assert len(re.findall(r"tt\.bitcast .* : i64 -> f64", code.ttir)) == 3
    # nothing is fp32 on the way
    assert re.search(r"\bf32\b", code.ttir) is None
    assert code.stack == 0
    assert [opcode for opcode in code.opcodes if is_atomic(opcode)] == []


@every_target
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_finalize_kernel_takes_an_inv_scale_of_any_float_dtype(target, dtype):
    code = finalize_launch(torch.ones((), dtype=dtype)).compile(target)
    # it is widened, by one step or two, and nothing is rounded
    assert "arith.extf" in code.ttir
    assert "arith.truncf" not in code.ttir


# launches


def test_there_is_one_launch_a_dtype_and_one_more():
    tensors = [torch.zeros(5, dtype=DTYPES[i % 2]) for i in range(200)]
    launches = launches_of(tensors)
    assert [launch.kernel.fn.__name__ for launch in launches] == [
        "_moments_kernel",
        "_moments_kernel",
        "_finalize_kernel",
    ]


@every_target
def test_sizes_and_thresholds_do_not_compile_a_kernel_anew(target):
    def variants(tensors, thresholds):
        return [launch.variant_of(target) for launch in launches_of(tensors, thresholds)]

    # 1 and multiples of 16 are what Triton would specialize on
    usual = variants([torch.zeros(9)], Thresholds())
    assert variants([torch.zeros(100_000)] * 16, Thresholds()) == usual
    assert variants([torch.zeros(16 * 2**15)], Thresholds()) == usual
    assert variants([torch.zeros(0), torch.zeros(7)], Thresholds(1.0, math.inf, 16.0)) == usual


# an odd number of pointers would leave the table behind them off a multiple of 16 bytes
@pytest.mark.parametrize("tensors", [2, 3])
def test_a_graph_captures_the_kernels_that_the_warm_up_compiled(monkeypatch, tensors):
    # a compilation while a stream is capturing takes seconds, and loads a module where that may be refused
    inputs = [torch.zeros(9)] * tensors
    eager = [launch.variant_of("sm_90") for launch in launches_of(inputs)]
    monkeypatch.setattr(pack, "_is_capturing", lambda _: True)
    monkeypatch.setattr(pack, "_captured", [])
    assert [launch.variant_of("sm_90") for launch in launches_of(inputs)] == eager


# these tests can fail: the same kernels, made a little worse

TILE_LOAD = "x = tl.load(aligned + (i * TILE + lanes)).to(NARROW)"


def variant(launch: Launch, old: str, new: str, folder: Path) -> Any:
    """Return the launch's kernel with one replacement in its source."""
    path = Path(launch.kernel.fn.__globals__["__file__"])
    text = path.read_text()
    assert text.count(old) == 1, f"{path.name} no longer holds this once, so this test needs another: {old}"
    changed = folder / f"changed_{path.name}"
    changed.write_text(text.replace(old, new))
    spec = importlib.util.spec_from_file_location(changed.stem, changed)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, launch.kernel.fn.__name__)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_a_mask_on_full_tiles_is_noticed(target, dtype, tmp_path):
    launch = moments_launch(dtype)
    masked = TILE_LOAD.replace("lanes))", "lanes), mask=i * TILE + lanes < n - head, other=0.0)")
    loop = launch.compile(target, variant(launch, TILE_LOAD, masked, tmp_path)).main_loop
    assert len(loop.narrow_loads) == loop.elements(dtype.itemsize)
    assert instructions_per_element(loop, dtype) > BOUNDS[target][DTYPES.index(dtype)]


@every_target
def test_a_pointer_of_unknown_alignment_is_noticed(target, tmp_path):
    launch = moments_launch(torch.float32)
    old = "aligned = tl.multiple_of((address + head * ITEMSIZE).to(tl.pointer_type(DTYPE)), 16)"
    new = "aligned = (address + head * ITEMSIZE).to(tl.pointer_type(DTYPE))"
    loop = launch.compile(target, variant(launch, old, new, tmp_path)).main_loop
    assert loop.narrow_loads


@every_target
def test_a_reduction_in_every_tile_is_noticed(target, tmp_path):
    launch = moments_launch(torch.float32)
    new = f"{TILE_LOAD}\n        x += tl.sum(x)"
    loop = launch.compile(target, variant(launch, TILE_LOAD, new, tmp_path)).main_loop
    assert loop.talk


@every_target
def test_one_more_fp64_operation_an_element_is_noticed(target, tmp_path):
    launch = moments_launch(torch.float32)
    new = f"{TILE_LOAD}\n        total += x.to(tl.float64) * 0.3"
    loop = launch.compile(target, variant(launch, TILE_LOAD, new, tmp_path)).main_loop
    assert loop.fp64_arithmetic > 2 * loop.elements(4)


@pytest.mark.parametrize(("target", "factor"), [("sm_90", 4), ("gfx942", 8)])
def test_a_tile_that_does_not_fit_into_registers_is_noticed(target, factor):
    launch = moments_launch(torch.float32)
    wide = replace(launch, kwargs=launch.kwargs | {"TILE": factor * launch.kwargs["TILE"]})
    assert wide.compile(target).stack > 0


def test_a_threshold_that_passes_through_fp32_is_noticed(tmp_path):
    launch = finalize_launch()
    old = "exploding = exploding.to(tl.int64).to(tl.float64, bitcast=True)"
    kernel = variant(launch, old, f"{old}.to(tl.float32).to(tl.float64)", tmp_path)
    assert re.search(r"\bf32\b", launch.compile("sm_90", kernel).ttir)


def test_sass_is_read_as_it_is_written():
    opcodes, loops = parse_sass("""
        /*0000*/                   LDC R1, c[0x0][0x28] ;            /* 0x00000a00ff017b82 */
                                                                     /* 0x000fe20000000800 */
        /*0010*/              @!P0 LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;   /* 0x0000000402047981 */
        /*0020*/                   F2F.F64.F32 R8, R4 ;
        /*0030*/                   DFMA R10, R8, R8, R10 ;
        /*0040*/              @UP1 BRA.U UP0, 0x10 ;
        /*0050*/                   EXIT ;
        /*0060*/                   BRA 0x60;
    """)
    assert opcodes == ["LDC", "LDG.E.128.CONSTANT", "F2F.F64.F32", "DFMA", "BRA.U", "EXIT", "BRA"]
    assert loops == [opcodes[1:5]]
    loop = Loop(loops[0])
    assert (loop.loads, loop.conversions, loop.fp64_arithmetic) == ([16], 1, 1)


def test_only_innermost_loops_are_read():
    outer = ".LBB0_1:\n\ts_nop 0\n{}\ts_cbranch_vccnz .LBB0_1\n"
    inner = ".LBB0_2:\n\tv_add_f64 v[0:1]\n\ts_cbranch_scc1 .LBB0_2\n"
    opcodes, loops = parse_amdgcn(outer.format(inner))
    assert loops == [opcodes[1:3]] == [["v_add_f64", "s_cbranch_scc1"]]


@pytest.mark.parametrize(
    ("opcode", "size"),
    [
        ("LDG.E.U16", 2),
        ("LDG.E", 4),
        ("LDG.E.LTC128B.64", 8),
        ("LDG.E.LTC128B.128", 16),
        ("LDG.E.128.CONSTANT", 16),
        ("LDS.128", 0),
        ("LDC", 0),
        ("global_load_ushort", 2),
        ("global_load_dword", 4),
        ("global_load_dwordx2", 8),
        ("global_load_dwordx4", 16),
        ("global_store_dwordx4", 0),
    ],
)
def test_the_width_of_a_load_is_known(opcode, size):
    assert load_size(opcode) == size


@pytest.mark.parametrize(
    "opcode", ["SHFL.BFLY", "BAR.SYNC.DEFER_BLOCKING", "STS", "ds_bpermute_b32", "s_barrier", "v_add_f32_dpp"]
)
def test_talk_between_threads_is_known(opcode):
    assert is_talk(opcode)
    assert not is_talk("DFMA")
    assert not is_talk("v_add_f32_e32")


@pytest.mark.parametrize("opcode", ["RED.E.ADD.F64.RN", "ATOMG.E.ADD", "global_atomic_add_f64"])
def test_atomics_are_known(opcode):
    assert is_atomic(opcode)
    assert not is_atomic("REDUX.MAX")
