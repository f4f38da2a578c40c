"""Healthy models of timm, small ones with random weights, if timm can be imported."""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch.nn import functional

from kernels_bench.zoo.contracts.subjects import subject

CLASSES = 5
SIZES = {
    "resnet10t": {},
    "resnet18": {},
    "efficientnet_b0": {},
    "mobilenetv3_small_050": {},
    "convnext_atto": {},
    "vit_tiny_patch16_224": {"img_size": 32, "patch_size": 8, "depth": 2},
    "vit_tiny_r_s16_p8_224": {"img_size": 64},
    "swin_tiny_patch4_window7_224": {"img_size": 32, "window_size": 4, "embed_dim": 24,
                                     "depths": (1, 1, 1, 1), "num_heads": (1, 2, 4, 8)},
    "mixer_s32_224": {"img_size": 128},
    "maxvit_pico_rw_256": {"img_size": 64},
    "deit_tiny_distilled_patch16_224": {"img_size": 32, "patch_size": 8, "depth": 2},
    "cait_xxs24_224": {"img_size": 32, "patch_size": 8, "depth": 2},
    "beit_base_patch16_224": {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 4},
    "regnetx_002": {},
}  # fmt: skip


def forward(model, batch):
    """Return the logits."""
    return model(batch[0])


def loss(model, batch):
    """Return the cross-entropy."""
    return functional.cross_entropy(model(batch[0]), batch[1])


def create(name, options):
    """Return a subject of a model of timm."""
    import timm

    model = timm.create_model(name, pretrained=False, num_classes=CLASSES, **options)
    side = options.get("img_size", 64)
    batch = (torch.randn(4, 3, side, side), torch.randint(0, CLASSES, (4,)))
    return subject(model, batch, forward=forward, loss=loss)


MODELS = {}
if importlib.util.find_spec("timm") is not None:
    for name, options in SIZES.items():
        MODELS[f"timm-{name.replace('_', '-')}"] = functools.partial(create, name, options)
