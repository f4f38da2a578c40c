"""Processes that are the ranks of a small job, on the CPU with Gloo: a function runs on all of them at once.

They are forked from a server that has imported torch once, and are reused: a call takes milliseconds.
`scripted` forks ranks that run a script with the environment of torchrun.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "torch",
        "torch._dynamo",
        # imported by the first compilation, a second or two in each rank
        "torch._functorch.aot_autograd",
        "torch._inductor.compile_fx",
        "torch._dynamo.testing",
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        "torch.distributed.pipelining",
        "gradiometer",
    ]
)


class RankFailedError(AssertionError):
    """The exception that a rank raised, with its traceback."""


class RankPool:
    """Ranks. ``run(function, *args)`` calls ``function(rank, *args)`` on each and returns the results.

    The function must be at the top level of a module that ranks can import.
    """

    def __init__(self, size: int, *, timeout: float = 60.0) -> None:
        self.size = size
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        self._pipes, self.processes = [], []
        for rank in range(size):
            here, there = _CONTEXT.Pipe()
            process = _CONTEXT.Process(target=_serve, args=(rank, size, store, timeout, there), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self.processes.append(process)

    def run(self, function: Any, *args: Any, timeout: float = 300.0) -> list[Any]:
        """Return the function's results by rank; raise the exception of the first rank that failed."""
        outcomes = self.outcomes(function, *args, timeout=timeout)
        for rank, (failed, value) in enumerate(outcomes):
            if failed:
                msg = f"rank {rank} of {self.size}: {value}"
                raise RankFailedError(msg)
        return [value for _, value in outcomes]

    def outcomes(self, function: Any, *args: Any, timeout: float = 300.0) -> list[tuple[bool, Any]]:
        """Return for each rank whether it failed, and its result or the text of its traceback."""
        for pipe in self._pipes:
            # a rank that has died is detected below
            with suppress(OSError):
                pipe.send((function, args))
        found = []
        for pipe in self._pipes:
            try:
                found.append(pipe.recv() if pipe.poll(timeout) else (True, f"no answer in {timeout:g} s"))
            except (EOFError, OSError):
                found.append((True, "the process has gone"))
        return found

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self._folder.cleanup()


def _serve(rank: int, size: int, store: str, timeout: float, pipe: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    warnings.simplefilter("error")
    # warnings from torch itself
    warnings.filterwarnings("ignore", module="torch")
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=timeout)
    )
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        except Exception:  # noqa: BLE001 what cannot be imported here
            pipe.send((True, traceback.format_exc()))
            continue
        try:
            answer = (False, function(rank, *args))
        except BaseException:  # noqa: BLE001 the next test goes on
            answer = (True, traceback.format_exc())
        pipe.send(answer)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def join_over_tcp(rank: int, size: int, port: int) -> None:
    """Create the process group with a store in rank 0, as torchrun does."""
    import torch.distributed as dist

    where, timeout = f"tcp://localhost:{port}", timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=size, timeout=timeout)


# the fixtures of the pools, by their size
RANKS = ("one_rank", "two_ranks", "three_ranks", "four_ranks")


def pool_of(request: Any, size: int) -> RankPool:
    """Return the pool of this size that the tests of a file share."""
    return request.getfixturevalue(RANKS[size - 1])


def scripted(script: Path, *args: str, size: int = 2, timeout: float = 240.0) -> str:
    """Run a script as the ranks of a job, in its folder; return their output. All must succeed.

    Like `torchrun`, which takes about 15 seconds to start: the same variables, and a store outside of the
    ranks. The exit of an interpreter is not tested.
    """
    from torch.distributed import TCPStore

    # like the store of torchrun's agent, on a free port
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    variables = {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    outputs = [script.parent / f"rank{rank}.txt" for rank in range(size)]
    processes = []
    for rank, output in enumerate(outputs):
        own = variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        arguments = (str(script), args, own, str(output))
        processes.append(_CONTEXT.Process(target=_run_script, args=arguments, daemon=True))
        processes[-1].start()
    end = time.monotonic() + timeout
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    printed = [output.read_text(encoding="utf-8") if output.exists() else "" for output in outputs]
    assert codes == [0] * size, (codes, [text[-4000:] for text in printed])
    return "".join(printed)


def _run_script(script: str, args: tuple[str, ...], variables: dict[str, str], output: str) -> None:
    import torch

    torch.set_num_threads(1)
    with open(output, "wb") as file:  # noqa: PTH123 for its descriptor
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ.update(variables)
    os.chdir(Path(script).parent)
    sys.argv = [script, *args]
    runpy.run_path(script, run_name="__main__")


def torchrun(script: Path, *args: str, timeout: float = 240.0) -> subprocess.CompletedProcess[str]:
    """Run a script as the two ranks of a job, in its folder; it has to succeed."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    # not those of this process, which may be a rank itself
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TRITON_INTERPRET"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(script), *args],
        cwd=script.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done
