"""What is known of an operation in a model: names of its tensors, its module, and the line that called it."""

from __future__ import annotations

from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from gradiometer.control.located import Located, Operand, describe
from gradiometer.control.operations import (
    Range,
    is_backward,
    key_of,
    line_of,
    next_number,
    storage_of,
    tensors_in,
)
from gradiometer.inputs import modules_by_name, named_buffers, named_parameters

if TYPE_CHECKING:
    from collections.abc import Sequence


class ModelContext:
    """Names of modules and tensors, the module that runs, and the operations that made the autograd graph.

    ``roots``: models and the prefixes of the names of their modules.
    """

    # nodes of the autograd graph with lower numbers were made before
    first_node = 0

    def __init__(self, roots: Sequence[tuple[str, nn.Module]]) -> None:
        self.paths: dict[nn.Module, str] = {}
        self.parameters: dict[Tensor, str] = {}
        self.buffers: list[tuple[str, Tensor]] = []
        # by the address of the storage
        self._labels: dict[int, str] = {}
        self._inputs: dict[int, tuple[StorageWeakRef, str]] = {}
        # names of the modules that run
        self._stack: list[str] = []
        # the operations that made the nodes of the autograd graph, by the nodes' numbers
        self._forward: dict[int, Located] = {}
        for prefix, root in roots:
            for name, modules in modules_by_name(root).items():
                for module in modules:
                    self.paths.setdefault(module, (prefix + name).removesuffix(".") if name else prefix[:-1])
            for name, p in zip(*named_parameters(root, "locate_nonfinite"), strict=True):
                self.parameters.setdefault(p, prefix + name)
                self._labels.setdefault(key_of(p), f"parameter {prefix + name}")
            for name, tensor in named_buffers(root):
                self.buffers.append((prefix + name, tensor))
                self._labels.setdefault(key_of(tensor), f"buffer {prefix + name}")
        for leaf, name in self.parameters.items():
            if leaf.is_leaf and leaf.grad is not None:
                self._labels.setdefault(key_of(leaf.grad), f"gradient {name}.grad")

    # tensors

    def record_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note the names of a model's arguments, as a hook before its forward."""
        try:
            bound = signature(module.forward).bind(*args, **kwargs).arguments
        except (TypeError, ValueError):
            bound = {f"argument {i}": x for i, x in enumerate(args)} | kwargs
        for name, value in bound.items():
            for tensor in tensors_in(value):
                key = key_of(tensor)
                if key and key not in self._inputs and key not in self._labels:
                    self._inputs[key] = StorageWeakRef(storage_of(tensor)), f"input {name} of the model"

    def label(self, tensor: Tensor) -> str | None:
        """Return what a tensor is, such as ``parameter blocks.3.w`` or ``input x of the model``, or None."""
        key = key_of(tensor)
        return self._inputs[key][1] if key in self._inputs else self._labels.get(key)

    def described(self, name: str, tensor: Tensor, range_: Range = None) -> Operand:
        """Return `describe` with the tensor's name in the model."""
        label = self.label(tensor)
        if label is not None and not label.startswith("input"):
            label = label.partition(" ")[2]
        return describe(name, tensor, label, range_)

    # modules and lines

    def enter_module(self, module: nn.Module, args: Any) -> None:
        """Note that a module runs, as a hook before its forward."""
        del args
        self._stack.append(self.paths[module])

    def leave_module(self, module: nn.Module) -> None:
        """Note that a module has run."""
        path = self.paths[module]
        # several, if a module within was left by an exception
        while path in self._stack and self._stack.pop() != path:
            pass

    def record_node(self, name: str) -> None:
        """Note the operation of a new node of the graph: nodes are made, and numbered, before they run."""
        number = next_number() - 1
        if number not in self._forward and number >= self.first_node:
            self._forward[number] = self.locate(name)

    def locate(self, name: str) -> Located:
        """Return the place of the current operation."""
        line, is_inside, is_repeated = line_of(in_backward=is_backward())
        module = self._stack[-1] if self._stack else None
        if not is_backward() or is_repeated:
            is_forward = module is not None or torch.is_grad_enabled()
            return Located(name, "forward" if is_forward else None, module, None, *line)
        node = torch._C._current_autograd_node()  # noqa: SLF001
        if node is None:
            reason = "adding up the gradients of a tensor that is used several times"
            return Located(name, "backward", None, reason, *line)
        # without an operation if that is not known
        forward = self._forward.get(node._sequence_nr(), Located())  # noqa: SLF001
        forward_name = forward.operation or node.name().rpartition("Backward")[0] or node.name()
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            forward_name = type(node).__name__.removesuffix("Backward")
        elif hasattr(node, "variable"):
            forward_name = f"adding up the gradients of {self.parameters.get(node.variable, 'a leaf')}"
        # a line inside of the backward is in a function of the user that it calls
        if forward.operation is not None and not is_inside:
            line = forward.file, forward.line
        return Located(name, "backward", forward.module, forward_name, *line)
