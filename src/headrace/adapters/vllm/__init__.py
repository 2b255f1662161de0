"""headrace as the weight offloader of vLLM: ``vllm serve MODEL --worker-cls headrace.adapters.vllm.Worker``.

vLLM's own offload flags keep their names and meanings. Options beyond them are given by
``--additional-config '{"headrace": {...}}'`` (:mod:`headrace.adapters.vllm.options`). A worker class is one of vLLM's
options, and so is the offloader that its model code asks for; the worker replaces no function of vLLM except its own
runner's ``load_model``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.adapters.vllm.worker import Worker

__all__ = ["Worker"]


def __getattr__(name: str) -> Any:
    """``Worker``, imported on first access: the import needs vLLM, of a supported version.

    Raises:
        OptionError: this vLLM is not supported; see the message.
    """
    if name == "Worker":
        import vllm

        from headrace.adapters.vllm.interface import require_supported

        require_supported(vllm.__version__)  # before the worker imports names that another version may lack
        from headrace.adapters.vllm.worker import Worker

        return Worker
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
