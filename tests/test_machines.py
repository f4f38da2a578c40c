"""The same tests with the instructions of other processors, selected here in separate processes.

PyTorch and Intel's library choose their loops by the instructions of the processor. Environment variables
make both act as on an older one, or as on one of another vendor.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import INTERPRETED, PROFILE

HERE = Path(__file__).parent

# two older processors, set for both libraries, and one of another vendor
SETTINGS = (
    "ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=SSE4_2",
    "ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2",
    "MKL_CBWR=COMPATIBLE",
)
# a process takes about 15 seconds: the deep profile also sets one library alone, as on no real processor
ALONE = [part for both in SETTINGS[:2] for part in both.split()]

# roots, flags at their thresholds, error bounds of sums, and bitwise laws
ROOTS = "columns/test_roots.py::test_a_million_roots_are_correctly_rounded"
TESTS = (
    f"{ROOTS}[eager]",
    "columns/test_roots.py::test_norms_of_a_report_are_roots_of_their_squares",
    "columns/test_roots.py::test_norms_of_tensors_are_roots_of_their_squares[None]",
    "columns/test_roots.py::test_a_norm_at_its_threshold_has_no_flag_and_its_neighbours_have",
    "test_numerics.py::test_1e_minus_10_beside_1e15_is_measured_as_both",
    "test_numerics.py::test_thresholds_are_compared_in_double_precision",
    "ops/test_pairs.py::test_differences_keep_what_fp32_would_lose",
    "ops/test_pairs.py::test_large_tensors_go_through_pieces[transposed]",
    "ops/test_reference.py::test_long_and_strided_tensors_agree_with_plain_pytorch",
    "test_laws.py::test_the_number_of_threads_changes_no_bit[dtype0-nonfinite]",
)
# for the deep profile: compiled graphs call the same PyTorch kernels, except for Inductor's own loops, which
# the other tests compile for the processor they run on
COMPILED = (
    *[f"{ROOTS}[{path}]" for path in ("aot_eager", "exported", "inductor")],
    "test_laws.py::test_a_compiled_call_gives_the_bits_of_an_eager_one[mixed-True]",
)


@pytest.mark.skipif(INTERPRETED, reason="the settings change nothing in the interpreter")
@pytest.mark.parametrize(
    "setting", [*SETTINGS, *[pytest.param(setting, marks=pytest.mark.deep) for setting in ALONE]]
)
def test_numbers_are_right_on_a_processor_with_other_instructions(setting, tmp_path):
    variables = dict(part.split("=") for part in setting.split())
    tests = (*TESTS, *COMPILED) if PROFILE == "deep" else TESTS
    # Inductor's cache does not distinguish these settings, and would return code for other instructions
    changes = variables | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    # testing the processor's instructions and precompiling headers take longer than one kernel
    changes |= {"TORCHINDUCTOR_VEC_ISA_OK": "1", "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"}
    # remove settings in force here, and the variables of this run's pytest workers
    left_out = {part.split("=")[0] for both in SETTINGS for part in both.split()}
    left_out |= {"PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER"}
    environment = {key: text for key, text in os.environ.items() if key not in left_out}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests],
        cwd=HERE,
        env=environment | changes,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
