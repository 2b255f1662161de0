"""Tiny models of every family that transformers and diffusers hold, run resident and offloaded, and compared.

``shrink.py`` makes configs small, ``inputs.py`` makes example inputs, ``builders.py`` brings both together to a
:class:`~families.builders.Case`, ``diffusion.py`` does the same for diffusers, ``ways.py`` offloads a case and
compares, ``sweep.py`` does that for all families in processes of their own. ``table.py`` holds what the general
rules get wrong.
"""

WAYS = ("load", "convert", "budget", "prefetch", "cached", "cached in files")
BAD = frozenset({"differs", "crashed", "timeout"})
