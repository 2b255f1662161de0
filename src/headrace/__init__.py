"""Run PyTorch models whose weights do not fit the device; same bits out.

This runs as it stands::

    import torch
    import headrace

    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8))).eval()
    handle = headrace.offload(model, "20MB")  # of device memory, for 34 MB of weights
    with torch.inference_mode():
        output = model(torch.randn(4, 1024))
    print(handle)  # what the offload takes, and what has moved
    handle.remove()  # the model is as it was

``help(headrace.offload)`` has policies, checkpoints and several devices; ``headrace --help`` the command line.

Names are imported on first use: the command line can show its help, and set the environment torch reads when it loads,
before torch is there.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.api import Handle, offload
    from headrace.config import UVA, Budget, OffloadConfig, Prefetch, Rules, Workload
    from headrace.errors import HeadraceError, HeadraceWarning
    from headrace.experts.rows import expert_rows
    from headrace.graphs.decoding import decode_in_graphs
    from headrace.offloaders import (
        BaseOffloader,
        NoopOffloader,
        PrefetchOffloader,
        UVAOffloader,
        create_offloader,
        get_offloader,
        set_offloader,
    )
    from headrace.plan.plan import Plan
    from headrace.plan.speculation import Speculation
    from headrace.plan_model import make_plan
    from headrace.stores.file_reads import DiskOptions

__all__ = [
    "UVA",
    "BaseOffloader",
    "Budget",
    "DiskOptions",
    "Handle",
    "HeadraceError",
    "HeadraceWarning",
    "NoopOffloader",
    "OffloadConfig",
    "Plan",
    "Prefetch",
    "PrefetchOffloader",
    "Rules",
    "Speculation",
    "UVAOffloader",
    "Workload",
    "create_offloader",
    "decode_in_graphs",
    "expert_rows",
    "get_offloader",
    "make_plan",
    "offload",
    "set_offloader",
]

if (_live := sys.modules.get("headrace.model.live_tensors")) is not None:  # this module is being reloaded
    _live.refuse_reload()

__version__ = "0.2.0"  # the one place; pyproject.toml reads it

# Every other public name is one of headrace.offloaders.
_HOMES = {
    "headrace.config": ("UVA", "Budget", "OffloadConfig", "Prefetch", "Rules", "Workload"),
    "headrace.errors": ("HeadraceError", "HeadraceWarning"),
    "headrace.experts.rows": ("expert_rows",),
    "headrace.graphs.decoding": ("decode_in_graphs",),
    "headrace.api": ("Handle", "offload"),
    "headrace.plan.plan": ("Plan",),
    "headrace.plan.speculation": ("Speculation",),
    "headrace.plan_model": ("make_plan",),
    "headrace.stores.file_reads": ("DiskOptions",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    home = import_module(_HOME_OF.get(name, "headrace.offloaders"))
    value = globals()[name] = getattr(home, name)  # found there from now on, without this function
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, "__version__"})
