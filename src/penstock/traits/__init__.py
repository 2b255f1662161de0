"""What a live model says of itself beyond names and sizes: :func:`traits_of`.

A room of its own, right of ``plan`` and left of ``handle``, so that :func:`penstock.offload` can plan for caches and
activations without importing transformers: models of that library are recognised by what they carry (a ``config``
with a text part), and read by their attributes. Any other module gets the defaults, which claim nothing.
"""

from penstock.traits.reading import traits_of

__all__ = ["traits_of"]
