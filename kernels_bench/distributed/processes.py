"""Ranks as processes on this machine, with Gloo over the loopback device: times, collectives, bytes.

Each process is a rank that holds its rows of every gradient, as with FSDP2. In every round each call runs
once, and starts on all ranks together; the calls in `APART` run in fewer rounds. The slowest rank of a round
counts: its wall time, and the CPU time of its threads, which is the better figure on a busy machine.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import statistics
import struct
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import gradiometer as gm
from kernels_bench.distributed import cost_model

SHAPE = (64, 64)
# these need a collective for each tensor and take seconds a call: fewer rounds, and a limit on the size
APART = ("norms apart", "gathered")
APART_ROUNDS = 3
MOST_APART = 4000  # ranks x tensors
WARM_UP = 2
SETTLED = 0.2  # seconds after a call until its traffic has ended
COLLECTIVES = ("reduce", "gather", "broadcast", "scatter", "all_to_all", "alltoall")


def contenders(parameters, ranks):
    """Return the timed calls, by name."""
    grads = [parameter.grad for parameter in parameters.values()]
    local = gm.collect_grads(parameters)
    sums = torch.zeros(len(ranks.names), cost_model.SUMS, dtype=torch.float64)
    tops = torch.zeros(len(ranks.names) + cost_model.CHECKS, cost_model.TOPS, dtype=torch.float64)

    def pair():
        works = [dist.all_reduce(sums, async_op=True)]
        works += [dist.all_reduce(tops, dist.ReduceOp.MAX, async_op=True)]
        for work in works:
            work.wait()

    calls = {
        "ours": lambda: gm.collect_grads(parameters, reduce=ranks),
        "local": lambda: gm.collect_grads(parameters),
        "merge": lambda: local.reduce(ranks),
        "pair": pair,
        "total norm": lambda: torch.nn.utils.get_total_norm(grads).full_tensor(),
    }
    if len(parameters) * ranks.size <= MOST_APART:
        calls["norms apart"] = lambda: [grad.norm().full_tensor().item() for grad in grads]
        calls["gathered"] = lambda: [grad.full_tensor() for grad in grads]
    return calls


class Traffic(TorchDispatchMode):
    """Counts collectives, the bytes given to them, and the bytes that a ring sends for them."""

    def __init__(self, ranks):
        super().__init__()
        self.ranks, self.collectives, self.payload, self.sent = ranks, 0, 0, 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # its inner operators are counted
        name = func._schema.name
        if "c10d" in name and any(word in name for word in COLLECTIVES):
            tensors = [args[0]] if isinstance(args[0], torch.Tensor) else args[0]
            nbytes = sum(tensor.nbytes for tensor in tensors)
            self.collectives += 1
            self.payload += nbytes
            reduced = "reduce" in name
            self.sent += cost_model.sent(nbytes, self.ranks) if reduced else (self.ranks - 1) * nbytes
        return func(*args, **kwargs or {})


def on_the_wire():
    """Return the bytes that this process's TCP sockets have received so far, or None if unknown."""
    total = 0
    try:
        for path in Path("/proc/self/fd").iterdir():
            try:
                number = os.dup(int(path.name))
            except OSError:  # the descriptor of /proc/self/fd itself
                continue
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                os.close(number)
                continue
            with socket.socket(fileno=number) as one:
                if one.family in {socket.AF_INET, socket.AF_INET6} and one.type == socket.SOCK_STREAM:
                    # linux/tcp.h: tcpi_bytes_received
                    info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
                    total += struct.unpack_from("=Q", info, 128)[0]
    except (AttributeError, FileNotFoundError):
        return None
    return total


def received(call):
    """Return the bytes that one call adds on this rank's sockets."""
    dist.barrier()
    time.sleep(SETTLED)
    before = on_the_wire()
    call()
    time.sleep(SETTLED)
    return None if before is None else on_the_wire() - before


def sharded(tensors, size):
    """Return parameters with gradients, cut by their rows over all ranks as FSDP2 does."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (size,))
    parameters = {}
    for i in range(tensors):
        local = torch.empty(SHAPE[0] // size, SHAPE[1])
        parameter = torch.nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False))
        parameter.grad = DTensor.from_local(torch.randn_like(local), mesh, [Shard(0)], run_check=False)
        parameters[f"layers.{i}.weight"] = parameter
    return parameters


def rank_main(rank, size, folder, all_tensors, rounds):
    """Measure on one rank; the figures go into a file."""
    torch.set_num_threads(1)
    # a file store, so that all TCP traffic comes from Gloo
    dist.init_process_group("gloo", init_method=f"file://{folder}/store-{size}", rank=rank, world_size=size)
    found = {}
    for tensors in all_tensors:
        parameters = sharded(tensors, size)
        setup = []
        for _ in range(3):
            dist.barrier()
            start = time.perf_counter()
            ranks = gm.Ranks(parameters)
            setup.append(time.perf_counter() - start)
        calls = contenders(parameters, ranks)
        times, traffic = {name: [] for name in calls}, {}
        for i in range(rounds + WARM_UP):
            order = [*calls][i % len(calls) :] + [*calls][: i % len(calls)]
            for name in order:
                if name in APART and i >= APART_ROUNDS + WARM_UP:
                    continue
                dist.barrier()
                start, cpu = time.perf_counter(), time.process_time()
                calls[name]()
                taken = time.perf_counter() - start, time.process_time() - cpu
                times[name].append([1e3 * seconds for seconds in taken])
        for name, call in calls.items():
            with Traffic(size) as counted:
                call()
            figures = {"collectives": counted.collectives, "payload": counted.payload, "sent": counted.sent}
            traffic[name] = figures | {"received": received(call)}
        kept = {name: values[WARM_UP:] for name, values in times.items()}
        found[tensors] = {"times": kept, "traffic": traffic, "setup_ms": [1e3 * s for s in setup]}
    Path(folder, f"{size}-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def measure(size, all_tensors, rounds):
    """Run ``size`` ranks; yield a row for each number of tensors."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_main, (size, folder, all_tensors, rounds), nprocs=size)
        by_rank = [json.loads(Path(folder, f"{size}-{rank}.json").read_text()) for rank in range(size)]
    for tensors in all_tensors:
        cells = [found[str(tensors)] for found in by_rank]
        row = {"ranks": size, "tensors": tensors, "traffic": cells[0]["traffic"]}
        row["setup_ms"] = statistics.median(map(max, zip(*[cell["setup_ms"] for cell in cells], strict=True)))
        for i, what in enumerate(("ms", "cpu_ms")):
            # a call lasts as long as on its slowest rank
            slowest = {
                name: [max(taken[i] for taken in turn) for turn in zip(*runs, strict=True)]
                for name in cells[0]["times"]
                for runs in [[cell["times"][name] for cell in cells]]
            }
            row[what] = {name: statistics.median(values) for name, values in slowest.items()}
            row[f"ratio_{what}"] = {
                name: statistics.median(
                    [ours / it for ours, it in zip(slowest["ours"], values, strict=name not in APART)]
                )
                for name, values in slowest.items()
            }
        for name, figures in row["traffic"].items():
            got = [cell["traffic"][name]["received"] for cell in cells]
            figures["received"] = None if None in got else sum(got) / size
        yield row


def fit(rows):
    """Return µs a hop, GB/s and the largest relative error of the fit ``hops * a + bytes / b``."""
    times = torch.tensor([row["ms"]["pair"] * 1e3 for row in rows], dtype=torch.float64)
    hops = torch.tensor([2.0 * 2 * (row["ranks"] - 1) for row in rows], dtype=torch.float64)
    moved = torch.tensor([row["traffic"]["pair"]["sent"] for row in rows], dtype=torch.float64)
    # relative errors, because the times span orders of magnitude
    terms = torch.stack([hops, moved], dim=1) / times[:, None]
    ones = torch.ones_like(times)[:, None]
    factors = torch.linalg.lstsq(terms, ones).solution[:, 0]
    if (factors <= 0).any():
        # too few bytes, or a busy machine: fit hops alone
        factors = torch.tensor([torch.linalg.lstsq(terms[:, :1], ones).solution.item(), 0.0]).double()
    hop_us, us_a_byte = factors.tolist()
    worst = (terms @ factors - 1).abs().max().item()
    return {"hop_us": hop_us, "gb_s": 1e-3 / us_a_byte if us_a_byte else None, "worst_miss": worst}
