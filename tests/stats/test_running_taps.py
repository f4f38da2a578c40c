"""Calls of `tap` land in the rows of the model that runs, and of no other."""

import contextlib
import copy
import gc
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradiometer as gm
from gradiometer.stats import running_taps

pytestmark = [
    pytest.mark.usefixtures("_guarded_hooks"),
    # Dynamo reads .grad of a graph's input that is not a leaf
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


@pytest.fixture
def _guarded_hooks(_dynamo):
    """Let one compiled function take models with and without taps."""
    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):
        yield


class Model(nn.Module):
    """A layer whose output has a tap, ``x``; ``inner`` is called before it."""

    def __init__(self, inner=None, use_reentrant=None):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.inner, self.use_reentrant = inner, use_reentrant

    def body(self, x):
        x = gm.tap(self.layer(x), "x")
        return torch.tanh(x)

    def forward(self, x):
        if self.inner is not None:
            x = self.inner(x)
        if self.use_reentrant is None:
            return self.body(x)
        return checkpoint(self.body, x, use_reentrant=self.use_reentrant)


@torch.compiler.disable
def fail(error):
    raise error


class Failing(nn.Module):
    """A model that fails between two taps."""

    def __init__(self, error=None, is_broken=False):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.error, self.is_broken = error, is_broken

    def forward(self, x):
        x = gm.tap(self.layer(x), "x")
        if self.is_broken:
            torch._dynamo.graph_break()
        if self.error is not None:
            fail(self.error)
        return gm.tap(x, "x")


X = torch.ones(3, 2)


def calls(taps):
    """Return the calls of the value and of the gradient that were measured, and forget them."""
    found = [int(n) for n in taps.stats().n_calls]
    taps.advance()
    return found


COMPILED = ["eager", "function", "torch.compile", "module.compile"]


def called(model, mode):
    """Return a callable that runs a model."""
    if mode == "module.compile":
        model.compile(fullgraph=True, backend="aot_eager")
    if mode == "torch.compile":
        return torch.compile(model, fullgraph=True, backend="aot_eager")
    if mode == "function":

        def function(x):
            return model(x) + 0.0

        return torch.compile(function, fullgraph=True, backend="aot_eager")
    return model


@pytest.mark.parametrize("mode", COMPILED)
def test_two_models_with_taps_of_one_name(mode):
    models = [Model(), Model(), Model()]
    first, second = [gm.Taps(model, names=["x"]) for model in models[:2]]
    a, b, untapped = [called(model, mode) for model in models]
    for _ in range(2):
        a(X).sum().backward()
        assert (calls(first), calls(second)) == ([1, 1], [0, 0])
        (b(X) * untapped(X)).sum().backward()
        assert (calls(first), calls(second)) == ([0, 0], [1, 1])
        (a(X) + untapped(X)).sum().backward()
        assert (calls(first), calls(second)) == ([1, 1], [0, 0])


def test_two_models_in_one_graph_with_its_backward():
    models = [Model(), Model(), Model()]
    first, second = [gm.Taps(model, names=["x"]) for model in models[:2]]

    def step():
        (models[0](X) + models[1](X) * models[2](X) + models[1](X)).sum().backward()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        compiled()
        assert (calls(first), calls(second)) == ([1, 1], [2, 2])
        for model in models:
            model.zero_grad()


@pytest.mark.parametrize("mode", COMPILED)
def test_two_taps_of_one_model_both_measure(mode):
    model = Model()
    first, second = gm.Taps(model, names=["x"]), gm.Taps(model, names=["x"])
    run = called(model, mode)
    run(X).sum().backward()
    assert (calls(first), calls(second)) == ([1, 1], [1, 1])
    if mode == "eager":
        first.remove()
        run(X).sum().backward()
        assert (calls(first), calls(second)) == ([0, 0], [1, 1])


def test_two_taps_of_one_model_both_measure_its_attention():
    class Attention(Model):
        def body(self, x):
            gm.tap_attention(x, x, "a")
            gm.tap_router(x.softmax(-1), "m")
            return self.layer(x)

    model = Attention()
    names = ["a.max_logit_bound", "m.expert_load", "m.router_entropy"]
    both = [gm.Taps(model, names=names), gm.Taps(model, names=names)]
    model(X)
    assert [calls(taps) for taps in both] == [[1, 1, 1, 0, 0, 0]] * 2


@pytest.mark.parametrize("mode", COMPILED)
def test_names_belong_to_the_innermost_model_that_lists_them(mode):
    class Outer(Model):
        def body(self, x):
            return super().body(gm.tap(x, "before"))

    class Inner(Model):
        def body(self, x):
            return super().body(gm.tap(x, "y"))

    model = Outer(Inner(Model()))
    outer = gm.Taps(model, names=["x", "y", "before"])
    inner = gm.Taps(model.inner, names=["x", "before"])
    called(model, mode)(X).sum().backward()
    # the innermost model has no taps: it belongs to the one around it
    assert calls(inner) == [2, 0, 2, 0]
    assert calls(outer) == [1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("mode", COMPILED[:2])
def test_a_model_that_calls_itself_measures_each_call_once(mode):
    class Recursive(Model):
        def forward(self, x, depth=2):
            x = self(x, depth - 1) if depth else x
            return self.body(x)

    model = Recursive()
    both = [gm.Taps(model, names=["x"]), gm.Taps(model, names=["x"])]
    called(model, mode)(X).sum().backward()
    assert [calls(taps) for taps in both] == [[3, 3], [3, 3]]


ERRORS = [ValueError("no"), KeyboardInterrupt(), SystemExit(1)]


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_in_a_forward_pass_ends_it(error, is_compiled):
    model, untapped = Failing(error, is_broken=is_compiled), Model()
    taps = gm.Taps(model, names=["x"])
    run = torch.compile(model, backend="aot_eager") if is_compiled else model
    # the error keeps the frames of the forward pass, as in a notebook
    with pytest.raises(type(error)) as kept:
        run(X)
    assert calls(taps) == [1, 0]
    for _ in range(2):
        untapped(X).sum().backward()
        gm.tap(X, "x")
        assert calls(taps) == [0, 0]
    assert not running_taps._THREAD.taps
    model.error = None
    with torch.no_grad():
        run(X)
    assert calls(taps) == [2, 0]
    del kept


@pytest.mark.parametrize("error", ERRORS[:2], ids=lambda error: type(error).__name__)
def test_an_error_in_an_inner_model_that_the_outer_one_handles(error):
    class Outer(Model):
        def forward(self, x):
            with contextlib.suppress(ValueError, KeyboardInterrupt):
                self.inner(x)
            return self.body(x)

    model = Outer(Failing(error))
    outer, inner = gm.Taps(model, names=["x"]), gm.Taps(model.inner, names=["x"])
    model(X).sum().backward()
    assert (calls(outer), calls(inner)) == ([1, 1], [1, 0])


def test_an_error_before_the_model_runs_leaves_the_outer_call_alone():
    class Outer(Model):
        def forward(self, x, depth=1):
            if depth:
                with contextlib.suppress(ValueError):
                    self(x, 0)
            return self.body(x)

    def refuse(_module, args):
        if len(args) == 2:
            raise ValueError

    model = Outer()
    model.register_forward_pre_hook(refuse)
    taps = gm.Taps(model, names=["x"])
    model(X).sum().backward()
    assert calls(taps) == [1, 1]


def test_a_traced_function_that_handles_an_error():
    class Raising(Model):
        def forward(self, x):
            x = self.body(x)
            msg = "no"
            raise ValueError(msg)

    model, untapped = Raising(), Model()
    taps = gm.Taps(model, names=["x"])

    def step(x):
        try:
            return model(x)
        except ValueError:
            return x * 2.0

    torch.compile(step, fullgraph=True, backend="aot_eager")(X)
    assert calls(taps) == [1, 0]
    untapped(X)
    assert calls(taps) == [0, 0]


def test_a_traced_part_of_a_model_that_handles_an_error_of_the_model():
    class Outer(Model):
        def forward(self, x, is_inner=False):
            if is_inner:
                msg = "no"
                raise ValueError(msg)
            return self.body(part(x))

    def step(x):
        try:
            return model(x, True)
        except ValueError:
            return x * 2.0

    model, part = Outer(), torch.compile(step, fullgraph=True, backend="aot_eager")
    taps = gm.Taps(model, names=["x"])
    model(X).sum().backward()
    assert calls(taps) == [1, 1]
    assert not running_taps._THREAD.taps


@pytest.mark.parametrize("is_compiled", [False, True])
def test_calls_outside_of_a_forward_pass_are_left_alone(is_compiled):
    model = Model()
    taps = gm.Taps(model, names=["x"])
    run = torch.compile(model.body, fullgraph=True, backend="aot_eager") if is_compiled else model.body
    run(X).sum().backward()
    assert gm.tap(X, "x") is X
    model(X).sum().backward()
    run(X).sum().backward()
    assert calls(taps) == [1, 1]


def test_a_compiled_part_of_several_models_measures_for_the_one_that_calls_it():
    part = torch.compile(lambda x: torch.tanh(gm.tap(x * 2.0, "x")), fullgraph=True, backend="aot_eager")

    class Caller(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x):
            return part(self.layer(x))

    models = [Caller(), Caller(), Caller()]
    first, second = gm.Taps(models[0], names=["x"]), gm.Taps(models[1], names=["other", "x"])
    for _ in range(2):
        for model in models:
            model(X).sum().backward()
        part(X)
    assert (calls(first), calls(second)) == ([2, 2], [0, 2, 0, 2])


@pytest.mark.parametrize("is_compiled", [False, True])
def test_models_that_run_in_threads(is_compiled):
    """While a tapped model runs, others run in other threads: one with taps, and one without."""
    inside, done = threading.Event(), threading.Event()

    class Waiting(Model):
        def forward(self, x):
            inside.set()
            assert done.wait(60)
            return self.body(x)

    waiting, tapped, untapped = Waiting(), Model(), Model()
    first, second = gm.Taps(waiting, names=["x"]), gm.Taps(tapped, names=["x"])
    mode = "function" if is_compiled else "eager"
    others = [called(model, mode) for model in (tapped, untapped)]
    thread = threading.Thread(target=lambda: waiting(X).sum().backward())
    thread.start()
    try:
        assert inside.wait(60)
        for run in others:
            run(X).sum().backward()
        gm.tap(X, "x")
    finally:
        done.set()
        thread.join(60)
    assert (calls(first), calls(second)) == ([1, 1], [1, 1])


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_of_two_models_in_one_backward_pass(use_reentrant):
    models = [Model(use_reentrant=use_reentrant) for _ in range(3)]
    first, second = [gm.Taps(model, names=["x"]) for model in models[:2]]
    x = X.clone().requires_grad_()
    for _ in range(2):
        # one after the other, and side by side
        models[2](models[1](models[0](x))).sum().backward()
        assert (calls(first), calls(second)) == ([1, 1], [1, 1])
        a, b = models[0](x), models[1](x)
        (a + b * models[2](x) + models[1](x)).sum().backward()
        assert (calls(first), calls(second)) == ([1, 1], [2, 2])
        a, b = models[0](x), models[1](x)
        a.sum().backward()
        assert (calls(first), calls(second)) == ([1, 1], [1, 0])
        b.sum().backward()
        assert (calls(first), calls(second)) == ([0, 0], [0, 1])
        models[2](x).sum().backward()
        assert (calls(first), calls(second)) == ([0, 0], [0, 0])


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_of_nested_models(use_reentrant):
    model = Model(Model(Model(use_reentrant=use_reentrant), use_reentrant), use_reentrant)
    outer, inner = gm.Taps(model, names=["x"]), gm.Taps(model.inner, names=["x"])
    again = gm.Taps(model.inner, names=["x"])
    model(X.clone().requires_grad_()).sum().backward()
    assert (calls(outer), calls(inner), calls(again)) == ([1, 1], [2, 2], [2, 2])


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_of_whole_models_and_inside_of_others(use_reentrant):
    class Twice(Model):
        def body(self, x):
            return checkpoint(super().body, self.layer(x), use_reentrant=use_reentrant)

    model = Twice(use_reentrant=use_reentrant)
    taps = gm.Taps(model, names=["x"])
    x = X.clone().requires_grad_()
    model(x).sum().backward()
    assert calls(taps) == [1, 1]
    checkpoint(model, x, use_reentrant=use_reentrant).sum().backward()
    assert calls(taps) == [1, 1]


def test_checkpoints_of_models_in_threads():
    """The forward passes overlap, so the nodes of both threads have the same numbers."""
    models = [Model(use_reentrant=True) for _ in range(2)]
    both = [gm.Taps(model, names=["x"]) for model in models]
    barrier = threading.Barrier(2)

    def train(model):
        x = X.clone().requires_grad_()
        for _ in range(3):
            loss = model(x).sum()
            barrier.wait(60)
            loss.backward()

    threads = [threading.Thread(target=train, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [calls(taps) for taps in both] == [[3, 3], [3, 3]]


def test_checkpoints_whose_backward_pass_runs_in_another_thread():
    """As on a GPU, where autograd has a thread of its own."""
    models = [Model(use_reentrant=True) for _ in range(3)]
    first, second = [gm.Taps(model, names=["x"]) for model in models[:2]]
    x = X.clone().requires_grad_()
    for _ in range(2):
        loss = (models[1](x) + models[2](models[0](x)) * models[1](x)).sum()
        # its own nodes have the numbers of the forward pass, too
        thread = threading.Thread(target=lambda loss=loss: [x.tanh() for _ in range(9)] and loss.backward())
        thread.start()
        thread.join(60)
        assert (calls(first), calls(second)) == ([1, 1], [2, 2])


@pytest.mark.parametrize("mode", COMPILED[:2])
def test_copies_measure_for_themselves(mode):
    model = Model()
    taps = gm.Taps(model, names=["x"])
    called(copy.deepcopy(model), mode)(X).sum().backward()
    assert calls(taps) == [0, 0]
    called(model, mode)(X).sum().backward()
    assert calls(taps) == [1, 1]


def test_taps_removed_inside_of_the_forward_pass():
    class Removing(Model):
        def body(self, x):
            x = super().body(x)
            taps.remove()
            return super().body(x)

    model = Removing()
    taps = gm.Taps(model, names=["x"])
    model(X)
    assert calls(taps) == [1, 0]
    assert not running_taps._THREAD.taps
    assert gm.tap(X, "x") is X


class Layers(nn.Module):
    """A model with hooks of each kind of tap."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        x = gm.tap(self.first(x), "x")
        gm.tap_attention(x, x, "a")
        gm.tap_router(x.softmax(-1), "m")
        return self.second(x)


KINDS = {
    "module": {"patterns": {"all": "."}},
    "tap": {"names": ["x"]},
    "attention": {"names": ["a.max_logit_bound"]},
    "router": {"names": ["m.expert_load", "m.router_entropy"]},
    "all": {
        "patterns": {"all": "."},
        "names": ["x", "a.max_logit_bound", "m.expert_load", "m.router_entropy"],
    },
}


def hooks_of(model):
    """Return all hooks of a model, and what torch remembers about them."""
    places = [vars(module) for module in model.modules()]
    return [item for place in places for name, items in place.items() if "_hooks" in name for item in items]


@pytest.mark.parametrize("ending", ["eager", "compiled", "checkpoint", "ValueError", "KeyboardInterrupt"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_with_taps_is_freed(kind, ending):
    model = Layers()
    taps = gm.Taps(model, **KINDS[kind])
    other = gm.Taps(model, **KINDS[kind])
    if "Error" in ending or "Interrupt" in ending:
        error = {"ValueError": ValueError, "KeyboardInterrupt": KeyboardInterrupt}[ending]
        model.second.register_forward_pre_hook(lambda *_: fail(error()))
        with contextlib.suppress(error):
            model(X)
    elif ending == "checkpoint":
        checkpoint(model, X.clone().requires_grad_(), use_reentrant=True).sum().backward()
    else:
        run = called(model, "function" if ending == "compiled" else "eager")
        run(X).sum().backward()
        del run
    assert calls(taps)[0] == 1
    kept = [weakref.ref(x) for x in (model, taps, other, taps.values, taps.grads, model.first.weight)]
    del model, taps, other
    # an error that is a variable of its own frame keeps all frames until the first collection
    gc.collect()
    gc.collect()
    assert [ref() for ref in kept] == [None] * len(kept)


def press_ctrl_c(_module, _args):
    raise KeyboardInterrupt


class Batch:
    """A value of a training loop."""


def interrupt(kept, model_class=Layers):
    """Let Ctrl-C end a forward pass; keep weak references to all that it used."""
    model, batch = model_class(), Batch()
    taps = [gm.Taps(model, names=["x"]) for _ in range(2)]
    model.second.register_forward_pre_hook(press_ctrl_c)
    kept += [weakref.ref(x) for x in (batch, model, *taps, taps[0].values)]
    model(X)


def test_ctrl_c_in_nested_models_keeps_nothing():
    class Outer(Layers):
        def __init__(self):
            super().__init__()
            self.inner = Layers()
            self.inner_taps = [gm.Taps(self.inner, names=["x"])]
            self.inner.second.register_forward_pre_hook(press_ctrl_c)

        def forward(self, x):
            return super().forward(self.inner(x))

    kept = []
    with contextlib.suppress(KeyboardInterrupt):
        interrupt(kept, Outer)
    gc.collect()
    assert [ref() for ref in kept] == [None] * 5
    assert not running_taps._THREAD.taps
    assert not running_taps._THREAD.calls


def test_ctrl_c_in_an_inner_model_keeps_the_outer_one_running():
    class Outer(Model):
        def forward(self, x):
            with contextlib.suppress(KeyboardInterrupt):
                interrupt(kept)
            gc.collect()
            freed.append([ref() is None for ref in kept])
            return self.body(x)

    kept, freed = [], []
    model = Outer()
    taps = gm.Taps(model, names=["x"])
    model(X).sum().backward()
    assert freed == [[True] * 5]
    assert calls(taps) == [1, 1]


def test_frames_that_another_thread_frees():
    """As by the garbage collector, which runs in any thread."""
    kept, errors = [], []
    try:
        interrupt(kept)
    except KeyboardInterrupt as error:
        errors.append(error)
    gc.collect()
    assert None not in [ref() for ref in kept]
    thread = threading.Thread(target=errors.clear)
    thread.start()
    thread.join(60)
    gc.collect()
    assert [ref() for ref in kept] == [None] * 5
    assert not running_taps._THREAD.taps


def test_frames_with_the_id_of_one_that_ctrl_c_has_ended(monkeypatch):
    """CPython may give the memory of a frame to another one."""
    monkeypatch.setattr(running_taps, "id", lambda _: 0, raising=False)
    model, untapped = Failing(), Failing()
    taps = gm.Taps(model, names=["x"])
    for _ in range(2):
        hook = model.register_forward_hook(lambda module, args, _: press_ctrl_c(module, args), prepend=True)
        with contextlib.suppress(KeyboardInterrupt):
            model(X)
        hook.remove()
        assert calls(taps) == [2, 0]
        untapped(X).sum().backward()
        assert calls(taps) == [0, 0]
    model(X).sum().backward()
    assert calls(taps) == [2, 2]


@pytest.mark.parametrize("kind", KINDS)
def test_removed_taps_leave_nothing_in_the_model(kind):
    model = Layers()
    before = len(hooks_of(model))
    taps = gm.Taps(model, **KINDS[kind])
    other = gm.Taps(model, **KINDS[kind])
    model(X).sum().backward()
    between = len(hooks_of(model))
    for _ in range(2):
        other.remove()
    assert before < len(hooks_of(model)) < between
    for _ in range(2):
        taps.remove()
    assert len(hooks_of(model)) == before
    seen = calls(taps)
    model(X).sum().backward()
    assert seen[0] == 1
    assert not any(calls(taps))
    kept = [weakref.ref(x) for x in (taps, taps.values)]
    del taps
    gc.collect()
    # the model lives on
    assert [ref() for ref in kept] == [None, None]
