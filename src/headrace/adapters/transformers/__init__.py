"""Transformers models from a local folder of safetensors: :func:`load`."""

from headrace.adapters.engine_interface import require_names

require_names(  # before the imports below need them
    "transformers",
    (5, 17),
    (5, 24),
    "transformers.conversion_mapping.get_model_conversion_mapping",
    "transformers.core_model_loading.rename_source_key",
    "transformers.generation.utils.ALL_CACHE_NAMES",
    "transformers.initialization.meta_device_safe_creation_ops",
    "transformers.modeling_utils.PreTrainedModel._from_config",
    "transformers.modeling_utils.PreTrainedModel._get_dtype_plan",
    "transformers.modeling_utils.PreTrainedModel.get_decoder",
)

from headrace.adapters.transformers.load_folder import build_meta_model, load  # noqa: E402

__all__ = ["build_meta_model", "load"]
