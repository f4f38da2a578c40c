"""A forward that is recorded operator by operator, so that a part of it can be computed again."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from gradiometer.checks.operators import FUSED_NORMS, MOVES, NORMS, POINTWISE, PRODUCTS, SHAPED
from gradiometer.checks.report import NotApplicable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from gradiometer.checks.probe import Probe

# a result of an operator: its index in the trace, and which of its results
Ref: TypeAlias = tuple[int, int]

# bytes of results that are kept
_MOST_BYTES: Final = 4 << 30


class UnknownError(Exception):
    """Raised where operators are in between of which it is not known what they do."""


@dataclass
class Node:
    """An operator that was called.

    Attributes:
        name: its name without namespace, overload and the underscore of operators in place.
        func: the operator; None for a view of what another operator changed in place.
        leaves: its arguments as a flat list; ``spec`` puts them together again.
        inputs: the position in leaves of each tensor that another operator returned, and where it is from.
        values: the tensors that it returned, as they were then.
        module: the innermost module that called it.
        is_random: whether it draws random numbers.
        is_weight: whether it only moves or scales parameters and buffers.
        is_noise: whether it depends on random numbers, and on no values of the model.
    """

    name: str
    func: Any
    leaves: list[Any]
    spec: Any
    inputs: dict[int, Ref]
    values: list[Tensor]
    module: nn.Module | None
    is_random: bool = False
    is_weight: bool = False
    is_noise: bool = False

    @property
    def is_pointwise(self) -> bool:
        """Whether each element of the result depends on the same element of the arguments alone."""
        if self.name in POINTWISE or self.is_noise:
            return True
        return self.func is not None and torch.Tag.pointwise in self.func.tags

    @property
    def is_plain(self) -> bool:
        """Whether it moves elements or computes each by itself."""
        return self.is_pointwise or self.name in MOVES

    @property
    def is_tokenwise(self) -> bool:
        """Whether it may be part of what is done with each token by itself."""
        return self.is_plain or self.name in NORMS

    @property
    def operands(self) -> tuple[int, int]:
        """The positions in leaves of the two operands of a product."""
        first = 1 if self.name in {"addmm", "baddbmm"} else 0
        return first, first + 1


class Trace(TorchDispatchMode):
    """Records what a forward computes; attention is computed in steps, not by a fused kernel."""

    def __init__(self, constants: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nodes: list[Node] = []
        self._constants = {id(x) for x in constants}
        self._made: dict[int, Ref] = {}
        # the results that share a storage, by its address, and everything that has an entry in `_made`
        self._aliases: dict[int, list[tuple[Tensor, Ref]]] = {}
        self._modules: list[nn.Module] = []
        self._bytes = 0
        self.output = torch.empty(0, device="cpu")

    @property
    def is_full(self) -> bool:
        """Whether not all was recorded, as it would take too much memory."""
        return self._bytes > _MOST_BYTES

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_full:
            return func(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        name = func._schema.name.partition("::")[2]  # noqa: SLF001 it has no public name
        inputs = {
            i: self._made[id(x)]
            for i, x in enumerate(leaves)
            if isinstance(x, Tensor) and id(x) in self._made
        }
        written = self._written(func, args, kwargs) if func._schema.is_mutable else []  # noqa: SLF001
        for x in written:
            self._keep(x)
        result = func(*args, **kwargs)
        values = [x for x in tree_flatten(result)[0] if isinstance(x, Tensor)]
        module = self._modules[-1] if self._modules else None
        node = Node(name.removesuffix("_"), func, leaves, spec, inputs, values, module)
        self._classify(node)
        self._add(node)
        for x in written:
            self._outdate(x, len(self.nodes) - 1)
        return result

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Note which module calls an operator."""

        def enter(module: nn.Module, _: object) -> None:
            self._modules.append(module)

        def leave(module: nn.Module, *_: object) -> None:
            while self._modules and self._modules.pop() is not module:
                pass

        handles = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    # what was recorded

    def value(self, ref: Ref) -> Tensor:
        """Return a result as it was."""
        return self.nodes[ref[0]].values[ref[1]]

    def argument(self, node: Node, position: int) -> Tensor:
        """Return an argument as it was."""
        ref = node.inputs.get(position)
        found = node.leaves[position] if ref is None else self.value(ref)
        assert isinstance(found, Tensor)  # noqa: S101 of an operand
        return found

    def is_weight(self, node: Node, position: int) -> bool:
        """Return whether an argument is a parameter or buffer, moved or scaled."""
        ref = node.inputs.get(position)
        return id(node.leaves[position]) in self._constants if ref is None else self.nodes[ref[0]].is_weight

    def is_projection(self, node: Node) -> bool:
        """Return whether an operator multiplies values by a weight."""
        return node.name in PRODUCTS and any(self.is_weight(node, i) for i in node.operands)

    def is_product(self, node: Node) -> bool:
        """Return whether an operator multiplies two matrices of values."""
        return node.name in PRODUCTS and not self.is_projection(node)

    def behind(self, ref: Ref, passes: Callable[[Node], bool]) -> tuple[list[int], list[int]]:
        """Go back from a result through the operators that pass.

        Returns:
            The indices of those that pass, and of the others that they got something from; latest first.
        """
        passed, ends, seen, waiting = [], [], {ref[0]}, [ref[0]]
        while waiting:
            index = waiting.pop()
            node = self.nodes[index]
            if not passes(node):
                ends.append(index)
                continue
            passed.append(index)
            new = {source for source, _ in node.inputs.values()} - seen
            seen |= new
            waiting += new
        return sorted(passed, reverse=True), sorted(ends, reverse=True)

    def between(self, start: Iterable[int], target: int) -> list[int]:
        """Return the indices of operators that lead from some to a later one, in order, without the first."""
        starts = set(start)
        reached = set(starts)
        for i in range(min(starts) + 1, target + 1):
            if i not in reached and any(source in reached for source, _ in self.nodes[i].inputs.values()):
                reached.add(i)
        needed, found = {target}, []
        for i in range(target, min(starts), -1):
            if i in needed and i in reached and i not in starts:
                found.append(i)
                needed |= {source for source, _ in self.nodes[i].inputs.values()}
        return found[::-1]

    # parts that are computed again

    def again(self, changes: Mapping[Ref, Tensor], target: Ref) -> Tensor:
        """Return a result for other values of earlier ones. Norms divide by what they divided by before.

        Raises:
            UnknownError: if an operator in between may mix tokens.
        """
        values = dict(changes)
        for i in self.between({index for index, _ in changes}, target[0]):
            node = self.nodes[i]
            if node.func is None or not node.is_tokenwise:
                raise UnknownError(node.name)
            leaves = [self._given(node, k, values) for k in range(len(node.leaves))]
            if node.name in FUSED_NORMS:
                # a change goes through, so that it can be followed
                change = leaves[0] - self.argument(node, 0)
                values[i, 0] = node.values[0] + change.to(node.values[0].dtype)
            elif node.name not in NORMS:
                results = self._called(node, leaves)
                values.update({(i, k): x for k, x in enumerate(results) if (i, k) not in changes})
        return values.get(target, self.value(target))

    def places(self, source: Ref, target: Ref) -> Tensor:
        """Return for each element of a result from which element of an earlier one it is; -1 if from none.

        Raises:
            UnknownError: if operators in between mix elements.
        """
        start = self.value(source)
        found = {source: torch.arange(start.numel(), device=start.device).view(start.shape)}
        for i in self.between({source[0]}, target[0]):
            node = self.nodes[i]
            carried = {k: found[ref] for k, ref in node.inputs.items() if ref in found}
            if node.name in {"max", "amax"}:
                # what a softmax subtracts from its input
                continue
            if node.func is None or not node.is_plain or not carried:
                raise UnknownError(node.name)
            if node.is_pointwise or node.name in {"_to_copy", "clone"}:
                shape = node.values[0].shape
                every = [x.expand(shape) for x in carried.values() if x.dim() <= len(shape)]
                if not every or any(not torch.equal(x, every[0]) for x in every[1:]):
                    raise UnknownError(node.name)
                found[i, 0] = every[0]
                continue
            leaves = list(node.leaves)
            for k, x in enumerate(leaves):
                if isinstance(x, Tensor):
                    leaves[k] = carried[k] if k in carried else torch.full_like(x, -1, dtype=torch.long)
                elif node.name == "constant_pad_nd" and isinstance(x, float):
                    leaves[k] = -1
            found.update({(i, k): x for k, x in enumerate(self._called(node, leaves))})
        if target not in found:
            raise UnknownError(self.nodes[target[0]].name)
        return found[target]

    # details

    def _given(self, node: Node, position: int, values: Mapping[Ref, Tensor]) -> Any:
        ref = node.inputs.get(position)
        if ref is None:
            return node.leaves[position]
        return values.get(ref, self.value(ref))

    def _called(self, node: Node, leaves: list[Any]) -> list[Tensor]:
        args, kwargs = tree_unflatten(leaves, node.spec)
        if node.func._schema.is_mutable:  # noqa: SLF001
            args = [x.clone() if isinstance(x, Tensor) else x for x in args]
        try:
            result = node.func(*args, **kwargs)
        except RuntimeError as error:
            raise UnknownError(node.name) from error
        return [x for x in tree_flatten(result)[0] if isinstance(x, Tensor)]

    @staticmethod
    def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
        found: list[Tensor] = []
        for i, each in enumerate(func._schema.arguments):  # noqa: SLF001
            if each.alias_info is not None and each.alias_info.is_write:
                value = args[i] if i < len(args) and not each.kwarg_only else kwargs.get(each.name)
                found += [x for x in (value if isinstance(value, list | tuple) else [value]) if x is not None]
        return found

    def _classify(self, node: Node) -> None:
        tensors = [k for k, x in enumerate(node.leaves) if isinstance(x, Tensor)]
        node.is_random = torch.Tag.nondeterministic_seeded in node.func.tags
        sources = [self.nodes[node.inputs[k][0]] if k in node.inputs else None for k in tensors]
        if node.name in SHAPED:
            node.inputs, tensors, sources = {}, [], []
        elif node.is_plain and tensors:
            node.is_weight = all([self.is_weight(node, k) for k in tensors])
        if node.is_random and node.name != "native_dropout":
            others = [x for x in sources if x is None or x.name not in SHAPED | {"empty"}]
            node.is_noise = node.name in {"bernoulli", "uniform", "normal", "random"} or not others
        elif node.is_plain and tensors:
            node.is_noise = any(x is not None and x.is_noise for x in sources) and all(
                x is not None and (x.is_noise or not x.inputs) for x in sources
            )

    def _add(self, node: Node) -> None:
        index = len(self.nodes)
        self.nodes.append(node)
        for k, x in enumerate(node.values):
            if x.layout != torch.strided:
                continue
            address = x.untyped_storage().data_ptr()
            if address not in self._aliases:
                self._bytes += x.untyped_storage().nbytes()
            self._made[id(x)] = index, k
            self._aliases.setdefault(address, []).append((x, (index, k)))

    def _keep(self, x: Tensor) -> None:
        """Keep the results as they are that share the storage of a tensor that will be written to."""
        for alias, (index, k) in self._aliases.get(x.untyped_storage().data_ptr(), ()):
            node = self.nodes[index]
            if node.values[k] is alias:
                node.values[k] = alias.clone()
                self._bytes += alias.nbytes

    def _outdate(self, x: Tensor, index: int) -> None:
        """Note that other views of a tensor have changed, too."""
        for alias, ref in list(self._aliases.get(x.untyped_storage().data_ptr(), ())):
            if alias is not x and self._made.get(id(alias)) == ref and ref[0] != index:
                node = Node("", None, [alias, x], None, {0: ref, 1: (index, 0)}, [alias], None)
                self.nodes.append(node)
                new = len(self.nodes) - 1, 0
                self._made[id(alias)] = new
                self._aliases[x.untyped_storage().data_ptr()].append((alias, new))


@contextmanager
def unfused() -> Iterator[None]:
    """Compute attention and torch's own transformer layers in steps, each by its own operators."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def traced(probe: Probe, *, training: bool = False, seed: int = 0) -> Trace:
    """Return the trace of a forward on the batch.

    Raises:
        NotApplicable: if it takes too much memory.
    """
    trace = Trace(probe.weights())
    with unfused(), trace.naming(), trace:
        trace.output = probe.output(training=training, seed=seed)
    if trace.is_full:
        raise NotApplicable("the activations of a forward take more than 4 GiB; pass a smaller batch")
    return trace
