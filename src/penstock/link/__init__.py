"""The path from store to device: worker threads on a CPU, streams on a GPU."""

from penstock.link.base import Link, Mark, Transfer

__all__ = ["Link", "Mark", "Transfer"]
