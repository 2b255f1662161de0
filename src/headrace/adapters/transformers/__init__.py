"""Transformers models from a local folder of safetensors: :func:`load`."""

from headrace.adapters.transformers.load_folder import build_meta_model, load

__all__ = ["build_meta_model", "load"]
