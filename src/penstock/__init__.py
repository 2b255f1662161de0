"""Run PyTorch models whose weights do not fit the device; same bits out."""

from penstock.config import UVA, Budget, OffloadConfig, Prefetch
from penstock.errors import PenstockError, PenstockWarning
from penstock.handle import Handle, offload
from penstock.offloaders import (
    BaseOffloader,
    NoopOffloader,
    PrefetchOffloader,
    UVAOffloader,
    create_offloader,
    get_offloader,
    set_offloader,
)
from penstock.plan import Plan
from penstock.store.disk import DiskOptions

__all__ = [
    "UVA",
    "BaseOffloader",
    "Budget",
    "DiskOptions",
    "Handle",
    "NoopOffloader",
    "OffloadConfig",
    "PenstockError",
    "PenstockWarning",
    "Plan",
    "Prefetch",
    "PrefetchOffloader",
    "UVAOffloader",
    "create_offloader",
    "get_offloader",
    "offload",
    "set_offloader",
]

__version__ = "0.1.0"
