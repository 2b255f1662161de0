"""Transformers models from a local folder of safetensors: :func:`load`."""

from headrace.adapters.engine_interface import Name, require_names

_NAMES = (
    Name("transformers.conversion_mapping", "get_model_conversion_mapping"),
    Name("transformers.core_model_loading", "rename_source_key"),
    Name("transformers.generation.utils", "ALL_CACHE_NAMES"),
    Name("transformers.initialization", "meta_device_safe_creation_ops"),
    Name("transformers.modeling_utils", "PreTrainedModel._from_config"),
    Name("transformers.modeling_utils", "PreTrainedModel._get_dtype_plan"),
    Name("transformers.modeling_utils", "PreTrainedModel.get_decoder"),
)
require_names("transformers", (5, 17), (5, 24), _NAMES)  # before what follows imports them

from headrace.adapters.transformers.load_folder import build_meta_model, load  # noqa: E402

__all__ = ["build_meta_model", "load"]
