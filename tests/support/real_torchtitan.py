"""torchtitan's debug model on the CPU: a script for two ranks, with patches for the missing CPU path.

``real_torchtitan.py fsdp|tp|pp none|watch|component`` prints what each rank has found as a line of JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from itertools import chain
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 the usual name
from torchtitan.tools import utils

# before other parts of torchtitan import them
utils.device_type, utils.device_module = "cpu", torch.cpu

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: E402
from torchtitan.components import metrics  # noqa: E402
from torchtitan.distributed import utils as dist_utils  # noqa: E402
from torchtitan.models.common import attention  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402
from torchtitan.tools.logging import init_logger  # noqa: E402

import gradiometer as gm  # noqa: E402

# what torchtitan 0.3 needs for pipelines, and for its default, spmd_types
NEW = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)
OVERRIDE = "gradiometer.integrations.torchtitan.monitor"
OPTIONS = {"updates": True, "weights": True, "precision": 2, "taps": r"\.feed_forward$"}


class Memory:
    device_name, device_capacity = "cpu", 1

    def get_peak_stats(self):
        return metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)

    def reset_peak_stats(self):
        pass


def attend(self, q_BLNH, k_BLNH, v_BLNH, *, scale=None, enable_gqa=False, **_):  # noqa: N803
    del self
    q, k, v = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa)
    return out.transpose(1, 2)


metrics.build_device_memory_monitor = Memory
dist_utils.set_pg_timeouts = lambda **_: None
# torchtitan compiles its own, which the CPU cannot differentiate
attention.FlexAttention.forward = attend


def make_data():
    """Write a tokenizer and texts."""
    Path("tok").mkdir()
    Path("texts").mkdir()
    texts = [" ".join(f"word{i * j % 97}" for j in range(60)) for i in range(200)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    marks = ["<|begin_of_text|>", "<|end_of_text|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=marks, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save("tok/tokenizer.json")
    settings = {"bos_token": marks[0], "eos_token": marks[1], "add_bos_token": True, "add_eos_token": True}
    Path("tok/tokenizer_config.json").write_text(json.dumps(settings))
    Path("texts/data.json").write_text("\n".join(json.dumps({"text": text}) for text in texts))


def configured(kind, how):
    c = llama3_debugmodel()
    c.model_spec = model_registry("debugmodel")
    c.hf_assets_path, c.dataloader.dataset_path = "tok", "texts"
    c.validator.enable = c.checkpoint.enable = False
    c.training.local_batch_size, c.training.global_batch_size = 2, 8
    c.training.seq_len, c.training.steps, c.training.disable_cuda_graphs = 32, 3, True
    c.debug.seed, c.debug.deterministic = 7, True
    c.parallelism.spmd_backend = "spmd_types" if NEW else "partial_dtensor"
    c.parallelism.tensor_parallel_degree = 2 if kind == "tp" else 1
    if kind == "pp":
        c.parallelism.pipeline_parallel_degree, c.training.local_batch_size = 2, 4
        c.parallelism.pipeline_parallel_microbatch_size = 2
    if how == "component":
        # as --override.imports gradiometer.integrations.torchtitan.monitor='{...}'
        c.override.imports = [(OVERRIDE, OPTIONS)]
    return c


def main(kind, how):
    init_logger()
    trainer = configured(kind, how).build()
    for module in chain.from_iterable(part.modules() for part in trainer.model_parts):
        # Gloo has no averages
        if hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(True)
    squares, logged = [], []
    clip, log = dist_utils.clip_grad_norm_, trainer.metrics_processor.log

    def clip_spied(parameters, *args, **kwargs):
        grads = [p.grad.full_tensor() for p in parameters]
        squares.append(sum(float(g.double().square().sum()) for g in grads))
        return clip(parameters, *args, **kwargs)

    def log_spied(step, loss, most, norm, **kwargs):
        rate = kwargs["extra_metrics"]["lr/AdamW"]
        logged.append({"step": step, "loss": loss, "norm": norm, "next lr": rate})
        return log(step, loss, most, norm, **kwargs)

    dist_utils.clip_grad_norm_, trainer.metrics_processor.log = clip_spied, log_spied
    watched = None
    if how == "watch":
        watched = gm.watch(trainer, run_dir="outputs/gradiometer", updates=True)
    elif how == "component":
        watched = trainer.metrics_processor.watched
    trainer.train()
    trainer.close()
    digest = hashlib.sha256()
    for p in chain.from_iterable(part.parameters() for part in trainer.model_parts):
        digest.update(p.detach().to_local().numpy().tobytes())
    found = {
        "weights": digest.hexdigest(),
        "squares": squares,
        "has loss": trainer.pp_has_last_stage if kind == "pp" else True,
        "logged": logged,
        "failures": watched and watched.monitor.failures,
    }
    # one write, which the other rank's output does not part
    os.write(1, f"\nFOUND {os.environ['RANK']} {json.dumps(found)}\n".encode())
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1] == "data":
        make_data()
    else:
        main(*sys.argv[1:])
