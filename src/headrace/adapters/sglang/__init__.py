"""headrace as the weight offloader of SGLang: ``HEADRACE_SGLANG=1 sglang serve MODEL --offload-group-size 4``.

SGLang runs :func:`register` in each of its processes (entry point group ``sglang.srt.plugins``). SGLang's own offload
flags keep their names and meanings. ``HEADRACE_SGLANG`` may also be a JSON object, with
options that SGLang has no flags for (:mod:`headrace.adapters.sglang.keys`).
"""

from __future__ import annotations

import os

__all__ = ["register"]


def register() -> None:
    """Hook headrace into SGLang if ``HEADRACE_SGLANG`` asks for it; otherwise import nothing and change nothing.

    Raises:
        SystemExit: headrace cannot be used. SGLang would log any ``Exception`` of a plugin, and serve without headrace.
    """
    value = os.environ.get("HEADRACE_SGLANG", "").strip()
    if value in ("", "0"):
        return
    try:
        from headrace.adapters.sglang.plugin import register_hooks

        register_hooks(value)
    except Exception as error:
        raise SystemExit(f"HEADRACE_SGLANG is set, and headrace cannot be used: {error}") from error
