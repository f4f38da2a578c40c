"""check_model in several processes: DistributedDataParallel and fully_shard."""

import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradiometer as gm
from support.rank_models import mesh_of
from support.small_models import Transformer, cross_entropy, text


def model_of(**rest):
    torch.manual_seed(0)
    return Transformer(**rest)


def test_the_module_of_ddp_is_examined_without_it(two_ranks):
    answers = two_ranks.run(under_ddp)
    for broken, evidence, _ in answers:
        assert broken == ["causal"]
        assert "token 1 changes the output of token 0" in evidence
    # both ranks still average their gradients
    assert answers[0][2] == answers[1][2] != 0


def under_ddp(rank):
    model = DistributedDataParallel(model_of(causal=False))
    # one rank alone: no collective of the check may wait for the other
    reports = [gm.check_model(model, text(), loss=cross_entropy)] if rank == 0 else []
    cross_entropy(model, text(seed=rank)).backward()
    norm = float(model.module.head.weight.grad.norm())
    (report,) = reports or [gm.check_model(model, text(), loss=cross_entropy)]
    return report.broken, report["causal"].text, norm


def test_sharded_parameters_are_named(two_ranks):
    for statuses, reason, optimizer in two_ranks.run(under_fsdp):
        assert set(statuses) == {"does not apply"}
        assert reason == "the parameters are sharded over ranks; check the model before it is sharded"
        assert optimizer == "holds"


def under_fsdp(_rank):
    model = model_of(causal=False)
    mesh = mesh_of((2,), ("dp",))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    adam = torch.optim.AdamW(model.parameters())
    report = gm.check_model(model, text(), optimizer=adam, loss=cross_entropy)
    statuses = [str(each.status) for each in report if each.group == "behaviour"]
    return statuses, report["causal"].text, str(report["optimizer"].status)
