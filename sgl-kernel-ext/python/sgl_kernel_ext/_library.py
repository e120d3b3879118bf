"""Loads the op library; every other module takes its ops from here."""

from __future__ import annotations

from pathlib import Path

import torch

torch.ops.load_library(Path(__file__).with_name("_sgl_kernel_ext.so"))
ops = torch.ops.sgl_kernel_ext
fake = torch.library.register_fake
