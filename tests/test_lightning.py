"""MonitorCallback for Lightning's Trainer, against the library itself, under both of its names."""

from __future__ import annotations

import importlib
import logging
import math
import warnings

import pytest
import torch

# whichever is there; the callback serves the other too
pytest.importorskip("pytorch_lightning")

from gradiometer.integrations.lightning import MonitorCallback  # noqa: E402
from test_huggingface_shared import Counter, Sink  # noqa: E402
