"""Where offloaded bytes rest: one file per store, all behind :class:`~penstock.store.base.Store`."""

from penstock.store.base import Segment, Store

__all__ = ["Segment", "Store"]
