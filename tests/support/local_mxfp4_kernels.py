"""Stands in for the download of transformers' MXFP4 kernels: gives it a ``triton_kernels`` that is installed.

Any that has ``matmul_ogs`` and ``routing`` will do, such as the copy in vLLM's wheel (``vllm/third_party``); newer ones
of Triton's have other names.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

_HUB_NAME = "kernels-community/gpt-oss-triton-kernels"
_USED = ("matmul_ogs", "numerics_details.mxfp", "routing", "swiglu", "tensor", "tensor_details.layout")


def missing() -> str | None:
    """Why they cannot be had here; ``None``: they can."""
    for name in _USED:
        try:
            importlib.import_module(f"triton_kernels.{name}")
        except ImportError as error:
            return f"triton_kernels.{name} cannot be imported ({error})"
    return None


def install() -> None:
    """Have transformers find them, and run MXFP4 with them in this process instead of dequantising it."""
    from transformers.integrations import hub_kernels
    from transformers.quantizers import quantizer_mxfp4

    if (why := missing()) is not None:
        raise ImportError(why)
    hub: Any = hub_kernels
    download = hub.get_kernel

    def get_kernel(kernel_name: str, *args: Any, **kwargs: Any) -> ModuleType:
        if kernel_name != _HUB_NAME:
            return download(kernel_name, *args, **kwargs)
        return importlib.import_module("triton_kernels")

    hub.get_kernel = get_kernel
    quantizer: Any = quantizer_mxfp4
    quantizer.is_kernels_available = lambda *_: True
