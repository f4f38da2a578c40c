"""The executor of compiled kernels: what its instructions compute, and what it refuses.

The first part executes a few lines of PTX. The second part changes single instructions of the real kernels:
either the executor refuses the changed kernel, or its results differ.
"""

from __future__ import annotations

import math
import os
import re
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conftest import INTERPRETED, PROFILE

if TYPE_CHECKING:
    from collections.abc import Callable

pytest.importorskip("triton")
if INTERPRETED or os.name != "posix" or os.uname().machine != "x86_64":
    pytest.skip("the executor needs compiled kernels, and 47-bit addresses", allow_module_level=True)

from support import ptx
from support.arithmetic import fma
from support.kernel_cases import SPECIAL, each_level, in_eager, integers, kernels, same_bits, tensor_stats
from support.ptx import Invalid

pytestmark = pytest.mark.usefixtures("triton_cache")

FRAME = """
.visible .entry lines(
	.param .u64 lines_param_0,
	.param .u64 lines_param_1
)
.reqntid 64
{{
	.reg .pred %p<9>;
	.reg .b16 %rs<9>;
	.reg .b32 %r<9>;
	.reg .b64 %rd<9>;
	ld.param.b64 %rd0, [lines_param_0];
	ld.param.b64 %rd1, [lines_param_1];
	mov.u32 %r0, %tid.x;
	{}
	ret;
}}
"""


def execute(lines: str, x: np.ndarray, *, blocks: int = 1, shared: int = 512) -> np.ndarray:
    """Run lines of PTX in blocks of 64 threads; %rd0 and %rd1 are the addresses of x and of the result."""
    out = np.zeros_like(x)
    tensors = [torch.from_numpy(x), torch.from_numpy(out)]
    addresses = [np.array([tensor.data_ptr()], np.uint64) for tensor in tensors]
    program = ptx.translate(FRAME.format(lines), shared)
    ptx.execute(program, blocks, addresses, ptx.buffers_of(list(map(ptx.span_of, tensors))))
    return out


def of_each(body: str, width: int) -> str:
    """Apply lines to the thread's element of x: from %r1, %rd2 or %rs1 to %r2, %rd3 or %rs2."""
    source, target = {2: ("%rs1", "%rs2"), 4: ("%r1", "%r2"), 8: ("%rd2", "%rd3")}[width]
    return f"""
        mad.wide.u32 %rd4, %r0, {width}, %rd0;
        mad.wide.u32 %rd5, %r0, {width}, %rd1;
        ld.global.b{8 * width} {{ {source} }}, [ %rd4 + 0 ];
        {body}
        st.global.b{8 * width} [ %rd5 + 0 ], {{ {target} }};
    """


def many(dtype: Any, seed: int = 0) -> np.ndarray:
    """Return 64 values: hard ones, and random bits."""
    bits = np.random.default_rng(seed).integers(0, 256, 64 * np.dtype(dtype).itemsize, dtype=np.uint8)
    x = bits.view(dtype).copy()
    if np.dtype(dtype).kind == "f":
        x[:6] = [0.0, -0.0, np.inf, -np.inf, np.nan, np.finfo(dtype).smallest_subnormal]
    return x


# instructions


@given(*[st.floats(allow_nan=False, allow_infinity=False, width=64)] * 3)
def test_fma_rounds_once(a, b, c):
    try:
        expected = float(Fraction(a) * Fraction(b) + Fraction(c))
    except OverflowError:
        expected = math.copysign(math.inf, a) * math.copysign(1, b)
    assert fma(*(np.array([x]) for x in (a, b, c))) == expected


def _bf16(x: np.ndarray) -> np.ndarray:
    return (x.view("u2").astype("u4") << 16).view("f4")


def _bytes(x: np.ndarray) -> np.ndarray:
    # bytes 2, 0, 1 of x, and the lowest of the thread's number
    tid = np.arange(64, dtype=np.uint32)
    return x >> 16 & 255 | (x & 255) << 8 | (x >> 8 & 255) << 16 | tid << 24


@pytest.mark.parametrize(
    ("body", "dtype", "expected"),
    [
        ("shl.b32 %r2, %r1, 33;", "u4", lambda x: x * 0),
        ("shr.s32 %r2, %r1, 40;", "i4", lambda x: np.where(x < 0, -1, 0)),
        ("shr.u32 %r2, %r1, 31;", "u4", lambda x: x >> 31),
        ("bfe.u32 %r2, %r1, 3, 5;", "u4", lambda x: x // 8 % 32),
        ("prmt.b32 %r2, %r1, %r0, 0x4102U;", "u4", _bytes),
        ("bfe.s32 %r2, %r1, 7, 3;", "i4", lambda x: x << 22 >> 29),
        ("bfe.s64 %rd3, %rd2, 7, 3;", "i8", lambda x: x << 54 >> 61),
        ("neg.s32 %r2, %r1;", "i4", lambda x: -x),
        ("and.b32 %r2, %r1, -65536;", "u4", lambda x: x // 65536 * 65536),
        ("cvt.u32.u64 %r2, %rd2; cvt.u64.u32 %rd3, %r2;", "u8", lambda x: x % 2**32),
        ("mov.b64 {%r3, %r4}, %rd2; mov.b64 %rd3, {%r4, %r3};", "u8", lambda x: x >> 32 | x << 32),
        ("max.f32 %r2, %r1, 0f00000000;", "f4", lambda x: np.where(x > 0, x, 0)),
        ("max.f32 %r2, %r1, 0f7FC00000;", "f4", lambda x: x),
        ("abs.f32 %r2, %r1;", "f4", np.abs),
        ("max.f16x2 %r2, %r1, 0;", "u4", lambda x: np.fmax(x.view("f2"), np.float16(0)).view("u4")),
        (
            "max.bf16x2 %r2, %r1, 0;",
            "u4",
            lambda x: (np.fmax(_bf16(x), 0).view("u4") >> 16).astype("u2").view("u4"),
        ),
        ("sqrt.rn.f64 %rd3, %rd2;", "f8", np.sqrt),
        ("setp.lt.f32 %p1, %r1, 0f3F800000; selp.b32 %r2, 1, 0, %p1;", "f4", lambda x: (x < 1) * 1.4e-45),
        ("setp.equ.f32 %p1, %r1, %r1; selp.b32 %r2, 1, 0, %p1;", "f4", lambda x: np.full(x.shape, 1.4e-45)),
        ("setp.ne.f32 %p1, %r1, %r1; selp.b32 %r2, 1, 0, %p1;", "f4", lambda x: x * 0 == 1),
        ("setp.nan.f32 %p1, %r1, %r1; selp.b32 %r2, 1, 0, %p1;", "f4", lambda x: np.isnan(x) * 1.4e-45),
        (
            "setp.eq.f16x2 %p1|%p2, %r1, 0; selp.b32 %r3, 1, 0, %p1; selp.b32 %r2, 2, %r3, %p2;",
            "u4",
            lambda x: np.where(x >> 16 & 0x7FFF == 0, 2, x % 2**15 == 0),
        ),
        ("cvt.f32.f16 %r1, %rs1; cvt.rn.f16.f32 %rs2, %r1;", "f2", lambda x: x),
        ("cvt.f32.bf16 %r1, %rs1; shr.u32 %r2, %r1, 16; cvt.u16.u32 %rs2, %r2;", "u2", lambda x: x),
    ],
)
def test_an_instruction_computes_what_the_manual_says(body, dtype, expected):
    x = many(dtype)
    with np.errstate(all="ignore"):
        wanted = np.asarray(expected(x)).astype(x.dtype)
        found = execute(of_each(body, x.itemsize), x)
    np.testing.assert_array_equal(found, wanted)
    if x.dtype.kind == "f":
        assert (np.signbit(found) == np.signbit(wanted))[~np.isnan(wanted)].all()


def test_threads_exchange_values():
    x = many("u4")
    warps = x.reshape(2, 32)
    found = execute(of_each("shfl.sync.bfly.b32 %r2, %r1, 4, 31, -1;", 4), x)
    assert found.tolist() == warps[:, np.arange(32) ^ 4].ravel().tolist()
    found = execute(of_each("mov.b32 %r3, -1; redux.sync.add.s32 %r2, %r1, %r3;", 4), x)
    assert found.tolist() == np.repeat(warps.sum(axis=1, dtype=np.uint32), 32).tolist()


THERE = "shl.b32 %r5, %r0, 2; mov.b32 %r6, global_smem; add.s32 %r6, %r6, %r5;"


def test_a_thread_reads_what_another_wrote_before_the_barrier():
    x = many("u4")
    body = f"""{THERE} st.shared.b32 [ %r6 + 0 ], %r1; bar.sync 0; xor.b32 %r5, %r0, 63; shl.b32 %r5, %r5, 2;
        mov.b32 %r6, global_smem; add.s32 %r6, %r6, %r5; ld.shared.b32 %r2, [ %r6 ];"""
    assert execute(of_each(body, 4), x).tolist() == x[::-1].tolist()


def test_matrices_are_distributed_over_a_warp():
    x = np.arange(64, dtype="u4")
    # eight rows of 16 bytes in the first 128 bytes, which all four matrices of both warps are
    body = f"""{THERE} st.shared.b32 [ %r6 + 0 ], %r1; bar.sync 0; and.b32 %r5, %r0, 7; shl.b32 %r5, %r5, 4;
        ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%r2, %r3, %r4, %r7}}, [%r5];"""
    assert execute(of_each(body, 4), x).tolist() == [*range(32)] * 2


# what is refused

BRANCH = "setp.lt.u32 %p1, %r0, {}; @%p1 bra $L__BB0_1; mov.b32 %r1, 2; $L__BB0_1: mov.b32 %r2, %r1;"
REFUSED = {
    "a register is read before it is written: .*'r3'": "add.s32 %r2, %r1, %r3;",
    "a read of 4 bytes outside": "ld.global.b32 { %r2 }, [ %rd4 + 4 ];",
    "a write of 4 bytes outside": "mov.b32 %r2, 0; st.global.b32 [ %rd5 + -4 ], { %r2 };",
    "not aligned": "ld.global.v2.b32 { %r2, %r3 }, [ %rd4 + 0 ];",
    "a branch that some threads": BRANCH.format(32),
    "shared memory is read before": f"{THERE} ld.shared.b32 %r2, [ %r6 ];",
    "beyond shared memory": f"{THERE} st.shared.b32 [ %r6 + 300 ], %r1; mov.b32 %r2, 0;",
    "several threads use shared": f"""{THERE} st.shared.b32 [ %r6 + 0 ], %r1; xor.b32 %r6, %r6, 128;
        ld.shared.b32 %r2, [ %r6 ];""",
    "threads write different values to the same shared": "st.shared.b32 [global_smem], %r1; mov.b32 %r2, 0;",
    "threads write different values to the same global": "st.global.b32 [ %rd1 ], { %r1 }; mov.b32 %r2, 0;",
    "more than": "$L__BB0_1: mov.b32 %r2, 0; bra.uni $L__BB0_1;",
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_a_gpu_forbids_is_refused(message, monkeypatch):
    monkeypatch.setattr(ptx, "_MOST_JUMPS", 1000)
    with pytest.raises(Invalid, match=message):
        execute(of_each(REFUSED[message], 4), np.arange(64, dtype="u4"))


def test_what_is_close_to_it_is_not():
    x = np.arange(64, dtype="u4")
    assert execute(of_each(BRANCH.format(64), 4), x).tolist() == x.tolist()
    assert execute(of_each(BRANCH.format(0), 4), x).tolist() == [2] * 64
    with pytest.raises(KeyError, match=re.escape("sin.approx.f32")):
        execute(of_each("sin.approx.f32 %r2, %r1;", 4), x)


def test_blocks_do_not_use_what_another_writes():
    # every block reads and writes the same elements: both write, and the second reads what the first wrote
    x = np.arange(64, dtype="u4")
    with pytest.raises(Invalid, match="several blocks"):
        execute(of_each("mov.b32 %r2, %r1;", 4), x, blocks=2)
    body = "mov.u32 %r2, %ctaid.x; setp.eq.s32 %p1, %r2, 1; @%p1 st.global.b32 [ %rd4 + 0 ], { %r2 };"
    with pytest.raises(Invalid, match="several blocks"):
        execute(of_each(body, 4).partition("st.global.b32 [ %rd5")[0], x, blocks=2)


def test_a_thread_that_has_not_written_a_register_has_a_huge_number_in_it():
    x = np.arange(64, dtype="u4")
    body = "setp.lt.u32 %p1, %r0, 60; @%p1 ld.global.b32 { %r2 }, [ %rd4 + 0 ];"
    assert execute(of_each(body, 4), x).tolist() == [*range(60), *[0x7F7F7F7F] * 4]


# changed kernels

_FLIPPED = {"eq": "ne", "ne": "eq", "lt": "ge", "ge": "lt", "gt": "le", "le": "gt"}
_SHUFFLE = r"shfl\.sync\.bfly\.b32\s+%r\d+, %r\d+"
# a change that must be noticed wherever it is made; not all changes matter, such as writing one value twice
CHANGES: dict[str, tuple[str, str | Callable[[re.Match[str]], str]]] = {
    "no barrier": (r"bar\.sync\s+0;", ""),
    # of both halves of an fp64 number
    "no exchange": (rf"({_SHUFFLE}), (\d+), (31, -1;\s*(?:\.loc.*\s*)?{_SHUFFLE}), \2,", r"\1, 0, \3, 0,"),
    "no store": (r"@%p\d+\s+st\.global[^;]*;", ""),
    "other branch": (r"(@)(%p\d+ bra)", r"\1!\2"),
    "other half": (r"(selp\.f32\s+%\w+), ([^,]+), ([^,]+), ", r"\1, \3, \2, "),
    "no square": (r"fma\.rn\.f64(\s+%rd\d+), (%rd\d+), %rd\d+, (%rd)", r"add.rn.f64\1, \2, \3"),
    "no magnitude": (r"max\.(f32|f64)(\s+%\w+), %\w+, (%\w+);", r"mov.\1\2, \3;"),
    "16 bytes on": (r"(ld\.global\.v4\.b32 \{[^}]*\}, \[ %rd\d+) \+ 0", r"\1 + 16"),
    "other comparison": (r"setp\.(eq|lt|gt|le|ge)\.", lambda match: f"setp.{_FLIPPED[match[1]]}."),
}


def moments_and_flags() -> list[torch.Tensor]:
    tensors = [integers(n, torch.float32, i) for i, n in enumerate((0, 1, 5, 2 * 2048 + 523))]
    # and of the whole tiles that are read again, and of the rest
    for place in (4, 1, 2, 11, *range(1539, 1543)):
        x = integers(1936, torch.float32, 1)
        x[::7], x[3::11], x[5::13] = SPECIAL
        x[place] = -9
        tensors.append(x)
    # the largest in each element of a thread: of the head, of the four loads of the main loop, of the tail
    for place in (0, *(3 + 512 * load + i for load in range(5) for i in range(4))):
        x = integers(3 + 2 * 2048 + 512, torch.float32, 1)
        x[place] = -9
        tensors.append(x)
    return [*tensors, *each_level(torch.float32, -3.0), *each_level(torch.float32, math.nan)]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(
            change, marks=() if change in {"no barrier", "no exchange", "no store"} else pytest.mark.deep
        )
        for change in CHANGES
    ],
)
def test_a_changed_moments_kernel_is_noticed(change):
    tensors = moments_and_flags()
    columns, flags = in_eager(tensors)
    pattern, other = CHANGES[change]
    sites: list[re.Match[str]] = []

    def is_noticed(site: re.Match[str] | None) -> bool:
        def changed(kernel: str, code: str) -> str:
            if kernel != "_moments_kernel":
                return code
            if site is None:
                sites.extend(re.finditer(pattern, code))
                return code
            return code[: site.start()] + re.sub(pattern, other, site[0]) + code[site.end() :]

        try:
            with kernels("sm_90", changed):
                found = tensor_stats(tensors)
        except Invalid:
            return True
        return not (same_bits(found[0], columns) and torch.equal(found[1], flags))

    assert not is_noticed(None)
    assert sites
    # each takes a second or two; the tensors above do not reach every maximum and every comparison
    every = PROFILE == "deep" and change not in {"no magnitude", "other comparison"}
    chosen = sites if every else sites[len(sites) // 2 :][:1]
    missed = [site for site in chosen if not is_noticed(site)]
    assert [(site.start(), site[0]) for site in missed] == []
