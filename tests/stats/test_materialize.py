"""Several collections and tensors in one transfer to the host: the same values, dtypes and nesting."""

from __future__ import annotations

import math
from collections import OrderedDict, namedtuple
from unittest import mock

import pytest
import torch

import gradiometer as gm
from gradiometer.stats import host_copy
from support.kinds import SCHEMAS, stats_of_kind

Slots = namedtuple("Slots", ["host", "seeds"])  # noqa: PYI024 as users have them


@pytest.fixture(params=[False, True], ids=["at once", "async"])
def fetch(request):
    if request.param:
        return lambda tree: gm.materialize_async(tree).result()
    return gm.materialize


def stats_of(**tensors):
    return gm.collect(tensors)


def test_stats_become_reports_wherever_they_stand(fetch):
    grads, host, seed = (
        stats_of(w=torch.ones(4)),
        stats_of(h=torch.ones(9)),
        stats_of(s=torch.tensor([math.nan])),
    )
    found = fetch({"grads": grads, "slots": [Slots(host, (seed,)), OrderedDict(again=grads)]})
    assert list(found) == ["grads", "slots"]
    for report, stats in (
        (found["grads"], grads),
        (found["slots"][0].host, host),
        (found["slots"][0].seeds[0], seed),
        (found["slots"][1]["again"], grads),
    ):
        assert type(report) is gm.Report
        assert repr(report.rows()) == repr(stats.materialize().rows())
        assert report.thresholds == stats.thresholds
    assert type(found["slots"][0]) is Slots
    assert type(found["slots"][1]) is OrderedDict


def test_stats_of_all_kinds_take_one_transfer(fetch, monkeypatch):
    stats = {kind: stats_of_kind(kind) for kind in SCHEMAS} | {"none": gm.collect_exponents({})}
    parcels = []
    # the CPU stands for a device
    monkeypatch.setattr(host_copy, "_is_on_host", lambda _: False)
    make_parcel = host_copy._Parcel
    monkeypatch.setattr(host_copy, "_Parcel", lambda xs: parcels.append(xs) or make_parcel(xs))
    empty = torch.empty
    plain = {"pin_memory": False}
    monkeypatch.setattr(torch, "empty", lambda *args, **options: empty(*args, **options | plain))
    monkeypatch.setattr(torch, "Event", lambda _: mock.Mock())
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: None)
    found = fetch({**stats, "nested": [stats["exponents"], torch.tensor(0.5)]})
    assert len(parcels) == 1
    monkeypatch.undo()
    assert found["nested"][1].item() == 0.5
    for kind, report in [*found.items(), ("exponents", found["nested"][0])]:
        if kind != "nested":
            assert type(report) is type(stats[kind].materialize())
            assert str(report) == str(stats[kind].materialize())


def test_one_collection_alone_is_a_report(fetch):
    stats = stats_of(a=torch.ones(4), b=torch.zeros(2))
    assert str(fetch(stats)) == str(stats.materialize())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(0.1, dtype=torch.bfloat16),
        torch.randn(3, 4)[:, ::2],
        torch.randn(3, 4).t(),
        torch.tensor([2**62 + 1, -(2**62) - 1]),
        torch.tensor([True, False]),
        torch.tensor(1 + 2j).conj(),
        torch.empty(0, 3, dtype=torch.float16),
        torch.tensor([math.nan, -math.inf, -0.0]),
        torch.randn(6, requires_grad=True),
        torch.nn.Parameter(torch.ones(2)),
    ],
    ids=lambda x: f"{x.dtype}-{tuple(x.shape)}",
)
def test_a_tensor_keeps_its_values_dtype_and_shape(fetch, tensor):
    found = fetch({"x": tensor})["x"]
    assert type(found) is torch.Tensor
    assert not found.requires_grad
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    torch.testing.assert_close(found, tensor.detach().resolve_conj(), rtol=0, atol=0, equal_nan=True)


def test_what_is_neither_stays_as_it_is(fetch):
    assert fetch({"lr": 0.1, "name": "run", "none": None, "empty": []}) == {
        "lr": 0.1,
        "name": "run",
        "none": None,
        "empty": [],
    }
    assert fetch([]) == []


def test_it_is_a_snapshot(fetch):
    stats, x = stats_of(w=torch.ones(4)), torch.ones(2)
    found = fetch({"stats": stats, "x": x})
    x.fill_(7.0)
    stats.columns.fill_(math.nan)
    assert found["x"].tolist() == [1.0, 1.0]
    assert found["stats"].total_norm == 2.0
    found["x"].fill_(9.0)
    assert x.tolist() == [7.0, 7.0]


def test_a_tensor_that_cannot_be_copied_flat_is_refused(fetch):
    with pytest.raises(TypeError, match=r"of shape \(2, 2\) is sparse or nested, .*; pass its values"):
        fetch({"x": torch.eye(2).to_sparse()})


def test_inside_a_compiled_function_it_is_refused(fetch):
    def step(x):
        return fetch([gm.collect([x])])

    with pytest.raises(Exception, match="a compiled function cannot do; call it outside"):
        torch.compile(step, fullgraph=True, backend="eager")(torch.ones(2))
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "dtypes", [[torch.float64], [torch.float64, torch.bfloat16, torch.int64, torch.bool]]
)
def test_what_comes_from_a_device_is_cut_where_it_was_joined(monkeypatch, dtypes):
    # the CPU stands for a device: tensors are joined there, and arrive bit for bit
    monkeypatch.setattr(host_copy, "_is_on_host", lambda x: x.dtype == torch.int32)
    tensors = [
        (100 * torch.randn(shape)).to(dtype)
        for dtype in dtypes
        for shape in ((), (3,), (0,), (2, 3), (1, 1, 5))
    ]
    tensors.insert(2, torch.ones(3, dtype=torch.int32))
    parcel = host_copy._Parcel(tensors)
    assert parcel.flat.dim() == 1
    host = parcel.flat.clone()
    for found, tensor in zip(parcel.unpack(host), tensors, strict=True):
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor)
        assert found.untyped_storage().data_ptr() != host.untyped_storage().data_ptr() or not found.numel()


def test_a_tensor_without_values_is_refused(fetch):
    with pytest.raises(TypeError, match=r"a tensor of shape \(2,\) is on the meta device and has no values"):
        fetch([torch.ones(2, device="meta")])
