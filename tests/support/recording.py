"""Steps of a recorder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import gradiometer as gm
from gradiometer.recorder import Catalog, StepRecord, Table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gradiometer.recorder.recorder import Recorder


def new_gradients(model: nn.Module, *, scale: float = 1.0) -> None:
    for p in model.parameters():
        p.grad = torch.randn_like(p) * scale


def record_of(
    step: int, catalog: Catalog, columns: Mapping[str, Tensor], scalars: Any = None, **fields: Any
) -> StepRecord:
    """Return a record with a table of each of these kinds: its raw columns, ``(N, C)``."""
    options = {"thresholds": fields["thresholds"]} if "thresholds" in fields else {}
    tables = {
        name: Table(catalog.kind(name), catalog.rows(name), values, **options)
        for name, values in columns.items()
    }
    return StepRecord(step, 0.0, scalars or {}, catalog, tables, **fields)


def packed(stats: gm.TensorStats) -> Tensor:
    return torch.cat([stats.columns, stats.flags.double().unsqueeze(1)], dim=1)


def written(record: gm.StepRecord, kind: str = "grads") -> Tensor:
    """Return a table as it is in the ring: columns and flags."""
    return torch.cat([record.columns(kind), record.flags(kind).double().unsqueeze(1)], dim=1)


def step_of(recorder: Recorder, model: nn.Module) -> Any:
    def step(x: Tensor) -> tuple[Tensor, gm.TensorStats]:
        loss = model(x).square().mean()
        loss.backward()
        recorder.record()
        stats = gm.collect_grads(model)
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(torch.where(recorder.skip_step, 0.0, 0.1 * p.grad))
                p.grad = None
        recorder.advance()
        return loss.detach(), stats

    return step
