"""`gm.fingerprint`: the text of each tensor of a state dict, for every dtype, kind and container."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import json
import re
from collections import OrderedDict, namedtuple

import numpy as np
import pytest
import torch
from torch import nn

import gradiometer as gm
from support.fingerprints import of_tensor

# the package has a function of the same name
of_names = importlib.import_module("gradiometer.stats.fingerprint")

DTYPES = sorted(
    {
        value
        for value in vars(torch).values()
        if isinstance(value, torch.dtype) and not str(value).startswith(("torch.q", "torch.bit"))
    },
    key=str,
)


def of(x):
    return gm.fingerprint({"x": x})["x"]


def random_bits(dtype, shape):
    size = torch.Size(shape).numel() * dtype.itemsize
    bits = torch.randint(0, 256, (size,), dtype=torch.uint8)
    # any other byte is not a bool
    return (bits % 2 if dtype == torch.bool else bits).view(dtype).view(shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3,), (5, 7), (2, 0, 3), (33, 64)], ids=str)
def test_the_text_has_the_dtype_the_shape_and_the_digits(dtype, shape):
    x = random_bits(dtype, shape)
    assert of(x) == f"{str(dtype).removeprefix('torch.')} {shape} {of_tensor(x)}"


# torch cannot copy integers of 1 to 7 bits
@pytest.mark.parametrize(
    "dtype", [x for x in DTYPES if not re.fullmatch(r"torch\.u?int[1-7]", str(x))], ids=str
)
def test_strides_and_alignment_do_not_matter(dtype):
    x = random_bits(dtype, (6, 10))
    assert of(x.t()) == of(x.t().contiguous())
    assert of(x[:, 1:4]) == of(x[:, 1:4].clone())
    assert of(x.view(-1)[1:14]) == of(x.view(-1)[1:14].clone())


def test_a_memory_format_does_not_matter():
    x = torch.randn(2, 3, 4, 5)
    assert of(x.to(memory_format=torch.channels_last)) == of(x)


def test_every_bit_counts():
    x = torch.tensor([0.0, 1.0])
    assert of(x) != of(torch.tensor([-0.0, 1.0]))
    assert of(x) != of(torch.tensor([1.0, 0.0]))
    nans = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert of(nans[:1]) != of(nans[1:])
    # the bits are equal, the dtype or the shape is not
    assert of(torch.tensor(1, dtype=torch.int32)) != of(torch.tensor(1, dtype=torch.uint32))
    assert of(torch.ones(2, 3)) != of(torch.ones(3, 2))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bool, torch.uint8, torch.int16, torch.int64, torch.complex64], ids=str
)
def test_a_sparse_tensor_has_the_text_of_its_dense_form(dtype):
    x = torch.eye(5).to(dtype)
    assert of(x.to_sparse()) == of(x)


def test_lazily_negated_and_conjugated_views_are_read_as_their_values():
    numbers = torch.arange(5)
    assert of(torch._neg_view(numbers)) == of(-numbers)
    z = torch.randn(5, dtype=torch.complex64)
    assert of(z.conj()) == of(z.conj().resolve_conj())
    assert of(z.conj().imag) == of(z.conj().imag.clone())


# sources


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x):
        return self.head(self.norm(self.embed(x)))


def train(model, steps=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(steps):
        model(torch.arange(7)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def test_a_module_has_the_names_of_its_state_dict():
    model = Model()
    found = gm.fingerprint(model)
    assert list(found) == list(model.state_dict())
    assert found == gm.fingerprint(model.state_dict())
    assert found == gm.fingerprint(list(model.state_dict().items()))
    assert found == gm.fingerprint(torch.compile(model)) == gm.fingerprint(nn.DataParallel(model))
    assert found == gm.fingerprint(torch.compile(model).state_dict())
    # tied, and an integer buffer
    assert found["embed.weight"] == found["head.weight"]
    assert found["norm.num_batches_tracked"] == f"int64 () {'0' * 32}"


def test_an_optimizer():
    optimizer = train(Model())
    found = gm.fingerprint(optimizer)
    assert found == gm.fingerprint(optimizer.state_dict())
    assert found["state.0.exp_avg"].startswith("float32 (7, 4) ")
    assert found["param_groups.0.betas"] == "[0.9, 0.999]"
    assert found["param_groups.0.lr"] == "0.01"
    assert gm.fingerprint(torch.optim.SGD([torch.zeros(1)], lr=1.0))["state"] == "{}"


def test_nested_mappings_and_lists():
    a, b, c = (torch.full((), x) for x in (1.0, 2.0, 3.0))
    pair = namedtuple("pair", "first second")  # noqa: PYI024 an untyped one, as users have
    found = gm.fingerprint({"x": {"y": [a, {0: b}]}, "z": pair(c, 5), "empty": [], "none": OrderedDict()})
    assert found == {
        "x.y.0": of(a),
        "x.y.1.0": of(b),
        "z.0": of(c),
        "z.1": "5",
        "empty": "[]",
        "none": "{}",
    }
    assert list(gm.fingerprint([a, [b, c]])) == ["0", "1.0", "1.1"]
    assert gm.fingerprint({}) == gm.fingerprint([]) == {}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "3"),
        (True, "True"),
        (0.1, "0.1"),
        (np.float64(0.1), "0.1"),
        (np.int32(3), "3"),
        (1 + 2j, "(1+2j)"),
        (None, "None"),
        ("adam", "'adam'"),
        (b"x", "b'x'"),
        ((0.9, 0.999), "[0.9, 0.999]"),
        (torch.float16, "torch.float16"),
        (torch.Size([2, 3]), "[2, 3]"),
        (nn.ReLU(), "ReLU, not compared"),
        ([print], "[builtin_function_or_method, not compared]"),
    ],
    ids=repr,
)
def test_other_values_are_text(value, text):
    assert gm.fingerprint({"x": value}) == {"x": text}


# beside a checkpoint


def test_one_flipped_bit_of_a_checkpoint_is_named(tmp_path):
    model = Model()
    optimizer = train(model)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 2}
    saved = gm.fingerprint(state)
    (tmp_path / "saved.json").write_text(json.dumps(saved))
    torch.save(state, tmp_path / "checkpoint.pt")

    loaded = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert gm.fingerprint(loaded) == json.loads((tmp_path / "saved.json").read_text())
    bits = loaded["model"]["norm.weight"].view(torch.int32)
    bits[2] ^= 1
    found = gm.fingerprint(loaded)
    assert [name for name in saved if saved[name] != found[name]] == ["model.norm.weight"]


@pytest.mark.skipif(importlib.util.find_spec("safetensors") is None, reason="needs safetensors")
def test_a_safetensors_file_gives_the_same_text(tmp_path):
    from safetensors.torch import load_file, save_file

    # odd sizes, so that tensors in the file begin anywhere
    dtypes = [torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.int64, torch.float8_e4m3fn]
    tensors = {str(dtype): random_bits(dtype, (5, 3)) for dtype in dtypes}
    save_file(tensors, tmp_path / "x.safetensors")
    assert gm.fingerprint(load_file(tmp_path / "x.safetensors")) == gm.fingerprint(tensors)


# errors


def quantized():
    return torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: torch.empty(3, device="meta"), "on the meta device .* materialize the model first"),
        (lambda: torch.empty(3, device="meta", dtype=torch.int64), "on the meta device"),
        (quantized, r"quantized dtype torch.qint8.* pass tensor.dequantize\(\)"),
        (lambda: torch.nested.nested_tensor([torch.ones(2)]), r"nested tensor.* pass tensor.values\(\)"),
        (lambda: torch.nested.nested_tensor([torch.ones(2).int()]), "nested tensor"),
        (lambda: torch.eye(2).to_sparse_csr(), r"layout torch.sparse_csr.* pass tensor.to_dense\(\)"),
        (lambda: torch.eye(2).int().to_sparse_csr(), "layout torch.sparse_csr"),
        (lambda: nn.LazyLinear(2).weight, "not initialized"),
        (lambda: torch._neg_view(torch.ones(2).to(torch.float8_e5m2)), "lazily negated"),
    ],
)
def test_a_tensor_that_cannot_be_read_is_named(make, said):
    with pytest.raises(TypeError, match=f"fingerprint: 'layers.1' .*{said}"):
        gm.fingerprint({"layers": [torch.ones(1), make()]})


def test_a_dtensor_is_refused():
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
        x = DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False)
        with pytest.raises(TypeError, match=r"'w' is a DTensor.* only a part; pass its full_tensor\(\)"):
            gm.fingerprint({"w": x})
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("source", "error", "said"),
    [
        (torch.ones(2), TypeError, "got one tensor"),
        (3, TypeError, "expected a module, a mapping"),
        ("model.pt", TypeError, "got str"),
        ([("a", torch.ones(1)), ("a", torch.zeros(1))], ValueError, "two tensors have the name 'a'"),
        ({"a.b": torch.ones(1), "a": {"b": 1}}, ValueError, "two tensors have the name 'a.b'"),
        ([(1, torch.ones(1))], TypeError, "a name must be a string"),
    ],
)
def test_other_sources_are_refused(source, error, said):
    with pytest.raises(error, match=f"fingerprint: .*{said}"):
        gm.fingerprint(source)


def test_inside_a_compiled_function_it_is_refused():
    compiled = torch.compile(lambda x: gm.fingerprint({"x": x}), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"fingerprint copies to the host.* call it outside"):
        compiled(torch.ones(1))


def test_nothing_is_changed():
    model = Model()
    before = copy.deepcopy(model.state_dict())
    gm.fingerprint(model)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


# expanded tensors

EXPANDED = {
    "rows": lambda x: x[:48].expand(17, 48),
    "columns": lambda x: x[:12, None].expand(12, 29),
    "odd rows": lambda x: x[:3].expand(211, 3),
    "odd rows, few": lambda x: x[:93].expand(3, 93),
    "odd columns": lambda x: x[:5, None].expand(5, 77),
    "inner": lambda x: x[:18].view(2, 1, 9).expand(2, 25, 9),
    "outer and inner": lambda x: x[:4].view(1, 4, 1).expand(26, 4, 8),
    "one element": lambda x: x[0].expand(13, 5, 7),
    "one row": lambda x: x[0].expand(1, 497),
    "windows": lambda x: x.as_strided((40, 60), (1, 1)),
    "transposed": lambda x: x[:3].expand(211, 3).t(),
}


@pytest.mark.parametrize("piece", [16, 32])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.complex64], ids=str)
@pytest.mark.parametrize("view", EXPANDED.values(), ids=EXPANDED.keys())
def test_an_expanded_tensor_has_the_fingerprint_of_its_copy(view, dtype, piece, monkeypatch):
    monkeypatch.setattr(of_names, "_PIECE", piece)
    x = view((torch.arange(100) % 23 + 1).to(dtype))
    assert of_names._is_expanded(x)
    assert of_names._reads(x) <= x.numel()
    assert gm.fingerprint({"w": x}) == gm.fingerprint({"w": x.contiguous()})


def test_a_huge_expanded_tensor_is_read_without_a_copy():
    x = torch.tensor([1.5, -2.0]).expand(2**30, 3, 2)
    small = gm.fingerprint({"w": x[: 2**18].contiguous()})
    assert gm.fingerprint({"w": x[: 2**18]}) == small
    began = torch.ones(1).expand(2**61)
    for huge in (x, began, began[: 2**40].view(2**20, 2**20)):
        text = gm.fingerprint({"w": huge})["w"]
        assert text.startswith(f"float32 {tuple(huge.shape)} ")


def test_what_would_take_too_long_is_refused():
    windows = torch.zeros(2**21).as_strided((2**20, 2**20), (1, 1))
    for x in (windows, torch.zeros(1, dtype=torch.int8).expand(3, 2**50 + 1)):
        with pytest.raises(ValueError, match=r"^fingerprint: 'w' has \d+ elements in \d+ bytes, too many"):
            gm.fingerprint({"w": x})
