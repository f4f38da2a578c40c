"""The kernel that copies a tensor with strides, in a step that is due, gives what torch's copy gives.

The plain run executes what Triton compiles; see test_compiled_kernels.py.
"""

from __future__ import annotations

import os

import pytest
import torch

from gradiometer.columns import CURSOR_SIZE, Cursor

pytest.importorskip("triton")
if os.name != "posix" or os.uname().machine != "x86_64":
    pytest.skip("the executor reads this machine's memory by 47-bit addresses", allow_module_level=True)

from gradiometer import kernels
from support.kernel_cases import kernels as kernels_of

pytestmark = pytest.mark.usefixtures("triton_cache")

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(shape, generator=generator).to(dtype)


VIEWS = {
    "a part of the columns": lambda dtype: numbers(37, 300, dtype=dtype)[:, 100:200],
    "every third column": lambda dtype: numbers(9, 70, dtype=dtype)[:, 1::3],
    "wide rows": lambda dtype: numbers(3, 3000, dtype=dtype)[:, 5:2900],
    "expanded": lambda dtype: numbers(1, 50, dtype=dtype).expand(20, 50),
    "expanded columns": lambda dtype: numbers(50, 1, dtype=dtype).expand(50, 20),
    "a number": lambda dtype: numbers(1, dtype=dtype).expand(40),
    "five dimensions": lambda dtype: numbers(4, 6, 4, 6, 8, dtype=dtype)[::2, ::2, ::2, ::2, ::2],
    "six dimensions": lambda dtype: numbers(4, 4, 4, 2, 4, 4, dtype=dtype)[::2, ::2, ::2, :1, ::2, ::2],
    "more than the kernel has": lambda dtype: numbers(4, 4, 4, 4, 4, 4, dtype=dtype)[
        (slice(0, None, 2),) * 6
    ],
    "heads": lambda dtype: numbers(2, 5, 3 * 16, dtype=dtype).chunk(3, -1)[1].unflatten(-1, (4, 4)),
    "one element": lambda dtype: numbers(2, 2, dtype=dtype)[1:, 1:],
}


def cursor(step: float = 0, every: float = 1) -> torch.Tensor:
    found = torch.zeros(CURSOR_SIZE, dtype=torch.float64)
    found[Cursor.STEP], found[Cursor.EVERY] = step, every
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", VIEWS)
def test_a_copy_has_the_values_of_the_tensor(name, dtype):
    x = VIEWS[name](dtype)
    with kernels_of("sm_90"):
        copy = kernels.contiguous(x, cursor())
    assert copy.is_contiguous()
    assert copy.dtype == (torch.float32 if x.itemsize == 1 else dtype)
    assert torch.equal(copy, x.to(copy.dtype))


@pytest.mark.parametrize(
    "dtype", [x for x in vars(torch).values() if str(x).startswith("torch.float8")], ids=str
)
def test_every_byte_is_converted(dtype):
    x = torch.arange(256, dtype=torch.uint8).view(dtype)
    with kernels_of("sm_90"):
        copy = kernels.contiguous(x, cursor())
    assert torch.equal(copy.view(torch.int32), x.float().view(torch.int32))


def test_a_contiguous_tensor_is_not_copied():
    x = numbers(5, 6)
    assert kernels.contiguous(x, cursor()) is x


@pytest.mark.parametrize(
    ("step", "every", "flag", "is_copied"),
    [(6, 3, None, True), (7, 3, None, False), (5, 0, None, False), (6, 3, 1, True), (6, 3, 0, False)],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e5m2], ids=str)
def test_only_a_step_that_is_due_copies(step, every, flag, is_copied, dtype):
    x = torch.ones(40, 40).to(dtype)[:, ::2]
    given = None if flag is None else torch.full((1,), flag, dtype=torch.int32)
    with pytest.MonkeyPatch.context() as patch, kernels_of("sm_90"):
        patch.setattr(torch, "empty", lambda *args, **options: torch.full(*args, 7.0, **options))
        copy = kernels.contiguous(x, cursor(step, every), given)
    assert (copy == (1.0 if is_copied else 7.0)).all()
