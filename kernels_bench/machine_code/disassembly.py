"""Read machine code as text: NVIDIA's as cuobjdump prints it, AMD's as LLVM does.

The result is opcodes and innermost loops, and the work of a loop for each element that it loads.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Loop:
    """The body of one loop, and its work per element read. A predicated instruction counts as one."""

    opcodes: list[str]

    @property
    def loads(self) -> list[int]:
        """Bytes that a thread reads in each load from global memory."""
        return [size for size in map(load_size, self.opcodes) if size]

    @property
    def narrow_loads(self) -> list[str]:
        """Loads from global memory of fewer than 16 bytes."""
        return [opcode for opcode in self.opcodes if 0 < load_size(opcode) < 16]

    @property
    def talk(self) -> list[str]:
        """Instructions that exchange values between the threads of a block, or synchronize them."""
        return [opcode for opcode in self.opcodes if is_talk(opcode)]

    def elements(self, itemsize: int) -> int:
        """Elements that a thread reads in one iteration."""
        return sum(self.loads) // itemsize

    def count(self, pattern: str) -> int:
        return sum(re.match(pattern, opcode) is not None for opcode in self.opcodes)

    @property
    def slots(self) -> int:
        """Issue slots of one iteration: each NVIDIA instruction takes one.

        A packed one of sm_100 and later computes two fp32 numbers, but the peak fp32 rate of these GPUs is
        that of the lanes: fp32 arithmetic takes a slot a number, if that is more.

        On CDNA only the vector unit's instructions count, in passes: scalar, memory and branch instructions
        of other waves issue beside them; LLVM's SISchedule.td gives fp16 <-> fp32 conversions four passes.
        """
        if not any(opcode.startswith(("v_", "s_")) for opcode in self.opcodes):
            packed = r"F(ADD|MUL|FMA)2\b"
            return max(len(self.opcodes), self.count(r"F(ADD|MUL|FMA)\b") + 2 * self.count(packed))
        return self.count("v_") + 3 * self.count(r"v_cvt_f(32_f16|16_f32)")

    @property
    def conversions(self) -> int:
        """Conversions of a floating-point number to fp64."""
        return self.count(r"F2F\.F64\.|v_cvt_f64_f(16|32)")

    @property
    def fp64_arithmetic(self) -> int:
        return self.count(r"D(FMA|ADD|MUL)\b|v_(fma|fmac|add|mul)_f64")

    @property
    def fp64_comparisons(self) -> int:
        return self.count(r"D(SETP|MNMX)\b|v_(cmpx?_\w+|max(_num)?|min(_num)?)_f64")

    def __str__(self) -> str:
        return ", ".join(f"{number} {opcode}" for opcode, number in Counter(self.opcodes).most_common())


class Listing(NamedTuple):
    """Machine code as text: opcodes, the line of each, and innermost loops.

    Opcodes are mnemonics with their modifiers, in address order. A span is a loop's first
    and last position in that list.
    """

    opcodes: list[str]
    lines: list[int]
    spans: list[tuple[int, int]]

    @property
    def loops(self) -> list[Loop]:
        return [Loop(self.opcodes[start : end + 1]) for start, end in self.spans]

    @property
    def main_span(self) -> tuple[int, int]:
        """The innermost loop that reads the most bytes of global memory per iteration; on a tie the first.

        The remainder loop of an unrolled loop, and the counting path's loop, never read more than that one. A
        loop over the partials of all blocks in the same kernel may; it comes after a release of memory.
        """
        release = (i for i, opcode in enumerate(self.opcodes) if re.match(r"MEMBAR|buffer_wbl2", opcode))
        end = next(release, len(self.opcodes))
        sizes = [
            sum(loop.loads) if last < end else 0
            for loop, (_, last) in zip(self.loops, self.spans, strict=True)
        ]
        if not any(sizes):
            raise ValueError("no loop of this kernel reads global memory")
        return self.spans[sizes.index(max(sizes))]


def parse_sass(text: str) -> Listing:
    """Read the output of ``cuobjdump -sass``."""
    code, lines = [], []
    for i, line in enumerate(text.splitlines()):
        found = re.search(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);", line)
        if found:
            code.append((int(found[1], 16), found[2], found[3]))
            lines.append(i)
    places = {address: place for place, (address, _, _) in enumerate(code)}
    spans = []
    for place, (address, opcode, operands) in enumerate(code):
        # some versions print the scheduling of an instruction after its operands
        last = re.search(r"0x([0-9a-f]+)\s*([&?].*)?$", operands)
        goal = last if opcode.startswith("BRA") else None
        # a branch to itself is padding after the end
        if goal and int(goal[1], 16) < address:
            spans.append((places[int(goal[1], 16)], place))
    return Listing([opcode for _, opcode, _ in code], lines, _innermost(spans))


def parse_amdgcn(text: str) -> Listing:
    """Read LLVM's assembly text for AMD GPUs."""
    opcodes: list[str] = []
    lines: list[int] = []
    labels: dict[str, int] = {}
    spans = []
    for i, line in enumerate(text.splitlines()):
        if label := re.match(r"(\.LBB\w+):", line):
            labels[label[1]] = len(opcodes)
        elif instruction := re.match(r"\t([a-z]\w+)(.*)", line):
            opcodes.append(instruction[1])
            lines.append(i)
            goal = re.search(r"\.LBB\w+", instruction[2]) if "branch" in instruction[1] else None
            if goal and goal[0] in labels:
                spans.append((labels[goal[0]], len(opcodes) - 1))
    return Listing(opcodes, lines, _innermost(spans))


def _innermost(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    # two branches back to the same address are one loop
    longest = {start: max(end for s, end in spans if s == start) for start, _ in spans}
    return sorted(
        (start, end)
        for start, end in longest.items()
        if not any(start < s and e <= end for s, e in longest.items())
    )


def load_size(opcode: str) -> int:
    """Return the bytes that a thread reads with this load from global memory; 0 for other instructions."""
    if re.match(r"(LDG|LD|LDGSTS)\.", opcode):
        # the width is a separate modifier: LTC128B is not one
        sizes = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}
        return next((sizes[part] for part in reversed(opcode.split(".")) if part in sizes), 4)
    if match := re.match(r"(?:global|flat|buffer)_load_(?:lds_)?(\w+)", opcode):
        sizes = {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}
        return sizes.get(match[1], 1 if "byte" in match[1] else 2)
    return 0


def is_talk(opcode: str) -> bool:
    nvidia = r"(SHFL|BAR|REDUX|VOTE|MATCH|WARPSYNC|LDS|STS|LDSM|STSM|ATOMS|SYNCS)\b"
    amd = r"ds_|s_barrier|v_readlane|v_permlane|\w+_dpp\b"
    return re.match(rf"{nvidia}|{amd}", opcode) is not None


def is_atomic(opcode: str) -> bool:
    nvidia = r"(ATOM|ATOMG|ATOMS|RED|REDG)\b"
    amd = r"(global|flat|buffer)_atomic|ds_\w+_rtn"
    return re.match(rf"{nvidia}|{amd}", opcode) is not None


def is_spill(opcode: str) -> bool:
    return re.match(r"(LDL|STL)\b|scratch_(load|store)", opcode) is not None


def flushes_subnormals(opcode: str) -> bool:
    return ".FTZ" in opcode
