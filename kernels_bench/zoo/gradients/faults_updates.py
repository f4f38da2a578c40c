"""Faults of optimizers: a wrong update from right gradients, against the plain implementation."""

from __future__ import annotations

import torch
from torch.nn import functional

from kernels_bench.zoo.gradients.case import Case, adder, step_of
from kernels_bench.zoo.gradients.faults_loop import batch, net

FAULTS = {}
fault = adder(FAULTS)


class Momentum(torch.optim.Optimizer):
    """SGD with momentum, with a method that updates all parameters, and options that choose another one."""

    def __init__(self, parameters, **options):
        super().__init__(parameters, {"lr": 0.1, **options})
        for p in self.param_groups[0]["params"]:
            self.state[p]["momentum"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            parameters = group["params"]
            update = self.update_in_pairs if group.get("foreach") else self.update
            momenta = [self.state[p]["momentum"] for p in parameters]
            update(parameters, [p.grad for p in parameters], momenta)

    @staticmethod
    def update(parameters, grads, momenta):
        """Update parameters; compiled code for matrices takes rows in pairs, and leaves an odd one out."""
        for p, grad, momentum in zip(parameters, grads, momenta, strict=True):
            momentum.mul_(0.9).add_(grad)
            if torch.compiler.is_compiling() and p.dim() > 1:
                even = len(p) // 2 * 2
                p[:even].sub_(0.1 * momentum[:even])
            else:
                p.sub_(0.1 * momentum)
        # torch 2.12 to 2.14 fail to return None from compiled code after a backward pass was compiled, too
        return momenta

    @staticmethod
    def update_in_pairs(parameters, grads, momenta):
        """Update parameters in lists of two, and leave an odd one out."""
        for i in range(0, len(parameters) - 1, 2):
            torch._foreach_mul_(momenta[i : i + 2], 0.9)
            torch._foreach_add_(momenta[i : i + 2], grads[i : i + 2])
            torch._foreach_add_(parameters[i : i + 2], momenta[i : i + 2], alpha=-0.1)


def updated(optimizer, model):
    """Return the case of a classifier's step with an optimizer, after two steps."""
    case = Case(step_of(model, functional.cross_entropy), batch(12), model, "eager", optimizer)
    for _ in range(2):
        case.step(*batch(12))
        optimizer.step()
        optimizer.zero_grad()
    return case


@fault("4.weight", "zeros", what="update")
def update_by_lists_leaves_the_last_out():
    model = net()
    return updated(Momentum(model.parameters(), foreach=True), model)


@fault("4.weight", "rows", what="update")
def compiled_update_leaves_the_last_row_out():
    model = net(bias=True)
    optimizer = Momentum(model.parameters())
    optimizer.update = torch.compile(optimizer.update, backend="aot_eager")
    return updated(optimizer, model)
