"""Many ranks without many machines: set-up simulated in one process, and predicted times of collectives.

`simulate` generates the messages of many ranks, and runs the set-up of `gm.Ranks` as the last of them.
`nccl_us` is the time that NCCL predicts for an all-reduce; `sent` is the minimum that a rank sends.
"""

from __future__ import annotations

import json
import time
import tracemalloc
from collections import Counter
from math import ceil, log2
from typing import NamedTuple

from gradiometer.distributed.calls import ARGUMENTS
from gradiometer.distributed.global_plan import Member, make_global_plan
from gradiometer.distributed.rendezvous import exchange
from gradiometer.distributed.sharding import Mesh, Sharding, ShardSpec

DOUBLE = 8
SUMS, TOPS = 7, 2
PER_NODE = 8
# assumed: 8 network cards of 400 Gbit/s
NODE_GB_S = 400.0
# assumed for Gloo over TCP between machines
HOP_US, TCP_GB_S = 30.0, 1.0
# NCCL's own table, by algorithm and protocol: µs of a call, of a hop over NVLink, of a hop over the network
# (NVIDIA/nccl, src/graph/tuning.cc, baseLat and hwLat, commit b6475625)
LATENCIES = {
    ("tree", "LL"): (6.8, 0.6, 5.0),
    ("tree", "LL128"): (14.0, 1.25, 8.5),
    ("tree", "Simple"): (0.0, 28.0, 28.0),
    ("ring", "LL"): (6.6, 0.6, 2.7),
    ("ring", "LL128"): (14.0, 1.9, 4.0),
    ("ring", "Simple"): (8.4, 3.4, 14.0),
}
# from the same file: each protocol's share of the bandwidth, and LL's maximum GB/s beyond two nodes
SHARES = {"LL": 1 / 4, "LL128": 0.92, "Simple": 1.0}
LL_GB_S = 20.4


# rows of the MAX by which ranks compare their calls, and the arguments of these
CHECKS = 1 + len(ARGUMENTS)


def payload(tensors, steps=1):
    """Return the bytes of the SUM and of the MAX all-reduce for this many tensors and steps at once."""
    return DOUBLE * SUMS * tensors * steps, DOUBLE * TOPS * (tensors * steps + CHECKS)


def sent(nbytes, ranks):
    """Return the bytes that each rank sends, and receives, in a ring all-reduce; no algorithm sends less."""
    return 2 * (ranks - 1) / ranks * nbytes


def nccl_us(nbytes, ranks, per_node=PER_NODE, gb_s=NODE_GB_S):
    """Return the µs that NCCL's cost model predicts for an all-reduce, with its algorithm and protocol."""
    nodes = ceil(ranks / per_node)
    inside = min(ranks, per_node)
    found = {}
    for (algorithm, protocol), (base, near, far) in LATENCIES.items():
        bandwidth = gb_s * SHARES[protocol]
        if protocol == "LL":
            bandwidth = min(bandwidth, LL_GB_S)
        if algorithm == "tree":
            hops = 2 * (inside - 1), 2 * int(log2(nodes))
            moved = 2 * nbytes
        else:
            across = 2 * nodes if nodes > 1 else 0
            hops = 2 * (ranks - 1) - across, across
            moved = sent(nbytes, ranks)
        microseconds = base + hops[0] * near + hops[1] * far + moved / bandwidth / 1e3
        found[microseconds] = f"{algorithm} {protocol}"
    best = min(found)
    return best, found[best]


def pair_us(tensors, ranks, **network):
    """Return the µs of our two all-reduces in sequence."""
    return sum(nccl_us(nbytes, ranks, **network)[0] for nbytes in payload(tensors))


def gloo_pair_us(tensors, ranks, steps, hop_us=HOP_US, gb_s=TCP_GB_S):
    """Return the µs of both all-reduces for this many steps at once with Gloo, which uses a ring."""
    return sum(2 * (ranks - 1) * hop_us + sent(n, ranks) / gb_s / 1e3 for n in payload(tensors, steps))


class Job(NamedTuple):
    """The mesh of a job: pipeline stages x replicas x shards x tensor parallel."""

    stages: int
    replicas: int
    shards: int
    tensor: int


def job(ranks):
    """Return a job: tensor parallel within a node, up to 8 stages, up to 64 shards; the rest are replicas."""
    tensor = 8 if ranks >= 64 else 2
    stages = 8 if ranks >= 512 else 1
    shards = min(64, ranks // (tensor * stages))
    return Job(stages, ranks // (tensor * stages * shards), shards, tensor)


def members_of(ranks, tensors):
    """Return the description that each rank sends, and the shardings by digest."""
    stages, replicas, shards, tensor = job(ranks)
    names = [f"model.layers.{i // 9}.feed_forward.w{i % 9}.weight" for i in range(tensors)]
    # as FSDP2 over tensor parallelism: both cut some tensors, only FSDP2 cuts norms
    cuts = (("R", "_S(0, 2)", "S(0)"), ("R", "S(0)", "S(1)"), ("R", "S(0)", "R"))
    digests, shardings = [], {}
    for stage in range(stages):
        own = tuple(names[stage * tensors // stages : (stage + 1) * tensors // stages])
        specs = tuple(ShardSpec((4096, 4096), "bfloat16", 0, cuts[i % 3]) for i in range(len(own)))
        mesh = Mesh(("dp_replicate", "dp_shard", "tp"), (replicas, shards, tensor), (0, 0, 0))
        sharding = Sharding(own, specs, (mesh,))
        digests.append(sharding.digest)
        shardings[sharding.digest] = sharding
    members = [
        Member(digests[stage], ((replica, shard, part),))
        for stage in range(stages)
        for replica in range(replicas)
        for shard in range(shards)
        for part in range(tensor)
    ]
    return members, shardings


class Book:
    """The store of a job in which all ranks but the last have written."""

    def __init__(self, key, told):
        self.values = {f"{key}/{rank}": value.encode() for rank, value in enumerate(told[:-1])}
        self.numbers = Counter({f"{key}/count": len(self.values)})
        self.given = 0

    def set(self, key, value):
        self.values[key] = value.encode() if isinstance(value, str) else value

    def compare_set(self, key, _, value):
        self.values.setdefault(key, value.encode())
        return self.values[key]

    def add(self, key, number):
        self.numbers[key] += number
        return self.numbers[key]

    def check(self, keys):
        return all(key in self.values for key in keys)

    def get(self, key):
        self.given += len(self.values[key])
        return self.values[key]

    def multi_get(self, keys):
        return [self.values[key] for key in keys]

    def delete_key(self, key):
        self.values.pop(key, None)


def heard(told):
    """Exchange descriptions as the last rank; return all ranks' descriptions, and their bytes."""
    told = [json.dumps(value) for value in told]
    book, ranks = Book("meeting", told), range(len(told))
    _, values = exchange(book, "meeting", ranks[-1], ranks, told[-1], 1.0)
    return [json.loads(value) for value in values], book.given


def simulate(ranks, tensors):
    """Run the set-up as the last of this many ranks; return CPU seconds, bytes per rank, peak memory."""
    members, shardings = members_of(ranks, tensors)
    firsts = {member.digest: place for place, member in reversed([*enumerate(members)])}
    told = [None] * ranks
    for digest, place in firsts.items():
        told[place] = shardings[digest].to_plain()

    def whole():
        start = time.process_time()
        found, member_bytes = heard([(member.digest.hex(), member.coordinates) for member in members])
        found = [
            Member(
                bytes.fromhex(digest), tuple([None if place is None else tuple(place) for place in places])
            )
            for digest, places in found
        ]
        layout_values, layout_bytes = heard(told)
        layout_values = [Sharding.from_plain(plain) for plain in layout_values if plain]
        met = time.process_time()
        plan = make_global_plan(found, {sharding.digest: sharding for sharding in layout_values})
        agreed = time.process_time()
        # the last rank has the most earlier ranks to compare with
        plan.counts(ranks - 1)
        seconds = {
            "meet": met - start,
            "make_global_plan": agreed - met,
            "count": time.process_time() - agreed,
        }
        return plan, {"seconds": seconds, "member_bytes": member_bytes, "layout_bytes": layout_bytes}

    plan, figures = whole()
    tracemalloc.start()
    whole()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    if len(plan.names) != tensors:
        raise RuntimeError(f"{len(plan.names)} names of {tensors}")
    store = ranks * (figures["member_bytes"] + figures["layout_bytes"])
    return {
        "job": job(ranks)._asdict(),
        "shardings": len(shardings),
        "peak_bytes": peak,
        "store_bytes": store,
    } | figures
