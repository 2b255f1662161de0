"""liger-kernel's RMSNorm in a model of transformers: one kernel in place of six or seven, and other bits than theirs.

https://github.com/linkedin/Liger-Kernel. Its function for a family also gives other classes and functions to the
family's modeling file, for models that are built later: these are taken back, so that one model has its kernels and no
other. Rotary embeddings are such a function, which all models of the process share, and stay transformers' own.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from typing import Any

import torch
from transformers import PreTrainedModel

from headrace.errors import OptionError

# Of every model of the process, of training, or of what headrace runs by itself (experts).
_LEFT_OUT = (
    "rope", "swiglu", "geglu", "relu_squared", "layer_norm", "cross_entropy", "fused_linear_cross_entropy",
)  # fmt: skip


def use_liger_norms(model: PreTrainedModel, device: torch.device) -> None:
    """Have liger-kernel's RMSNorm run in ``model``, which is built, and in no other.

    Raises:
        OptionError: ``device`` is no GPU, the package is not installed, or it does not know the model or its norms.
    """
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise OptionError(
            f"use_liger_kernel: expected a GPU, for which its kernels are, found {device}: leave it out "
            f"(--use-liger-kernel)"
        )
    if find_spec("liger_kernel") is None:
        raise OptionError(
            "use_liger_kernel: expected the package liger-kernel, found none: pip install 'headrace[liger]', or leave "
            "it out (--use-liger-kernel)"
        )
    from liger_kernel.transformers import _apply_liger_kernel_to_instance
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    known, kind = MODEL_TYPE_TO_APPLY_LIGER_FN, model.config.model_type
    if kind in known:
        files: list[dict[str, Any]] = [vars(m) for n, m in sys.modules.items() if n.startswith("transformers.models.")]
        before = [dict(names) for names in files]
        try:
            _apply_liger_kernel_to_instance(model, rms_norm=True, **dict.fromkeys(_LEFT_OUT, False))
        finally:
            for names, had in zip(files, before, strict=True):
                names.update((name, had[name]) for name in had if names[name] is not had[name])
    if not any("forward" in vars(module) for module in model.modules()):
        raise OptionError(
            f"use_liger_kernel: expected a model with norms for which liger-kernel has kernels, found {kind!r}: leave "
            f"it out (--use-liger-kernel), or see whether a newer liger-kernel has it"
        )
