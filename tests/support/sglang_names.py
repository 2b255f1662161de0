"""What headrace relies on of SGLang: hooked functions, parameters, fields, and calls.

The stand-in is held to this table with every commit, and SGLang itself by ``scripts/test-sglang-cpu``.
"""

from __future__ import annotations

from engine_names import Name

_OFFLOADER = "sglang.srt.utils.offloader"
_RUNNER = "sglang.srt.model_executor.model_runner"
_BACKENDS = "sglang.srt.model_executor.runner_backend"
_BREAKABLE = "sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.breakable_cuda_graph"
_UPDATES = "sglang.srt.managers.scheduler_components.weight_updater"
_EXPORT = "sglang.srt.model_executor.model_runner_components.weight_exporter"
_CAPTURE = ("self", "shape_key", "forward_fn", "capture_inputs", "post_warmup_hook")
_WRAP = ("self", "all_modules_generator", "submodule_accessor", "whitelist_param_names_creator")
_GRAPHS = (
    (f"{_BACKENDS}.full_cuda_graph_backend", "FullCudaGraphBackend"),
    (f"{_BACKENDS}.breakable_cuda_graph_backend", "BreakableCudaGraphBackend"),
)
NAMES = (
    Name("sglang.srt.plugins", "load_plugins", (), mentions=("apply_hooks",)),
    Name("sglang.srt.plugins.hook_registry", "HookRegistry.register", ("target", "hook", "hook_type")),
    Name(_OFFLOADER, "create_offloader", ()),
    Name(_OFFLOADER, "set_offloader", ("instance",)),
    Name(_OFFLOADER, "get_offloader", ()),
    Name(_OFFLOADER, "NoopOffloader"),
    Name(_OFFLOADER, "BaseOffloader.wrap_modules", _WRAP),
    Name(_OFFLOADER, "BaseOffloader.post_init", ("self",)),
    Name(_OFFLOADER, "BaseOffloader.forbid_copy_engine_usage"),
    Name("sglang.srt.utils.common", "make_layers", mentions=("get_offloader", "wrap_modules")),
    Name("sglang.srt.layers.vocab_parallel_embedding", "VocabParallelEmbedding"),
    Name("sglang.srt.layers.vocab_parallel_embedding", "ParallelLMHead"),
    Name("sglang.srt.runtime_context", "get_context", ()),
    Name("sglang.srt.runtime_context", "get_parallel", ()),
    Name("sglang.srt.runtime_context", "RuntimeContext.config_leaf", ("self", "name")),
    Name("sglang.srt.runtime_context", "RuntimeContext.override", ("self", "source")),
    # The offloader is set before the model is built, and post_init runs once its weights are final.
    Name(_RUNNER, "ModelRunner.__init__", mentions=("set_offloader", "create_offloader", "initialize")),
    Name(_RUNNER, "ModelRunner.load_model", ("self",), mentions=("get_offloader", "post_init", "is_draft_worker")),
    Name(_RUNNER, "ModelRunner.forward", ("self", "forward_batch")),
    Name(_RUNNER, "ModelRunner.check_weights", ("self", "action")),
    # The warm-up hook is called before each capture.
    *(Name(module, f"{name}.capture_one", _CAPTURE) for module, name in _GRAPHS),
    *(Name(module, f"{name}.replay", ("self", "shape_key")) for module, name in _GRAPHS),
    *(Name(module, f"{name}.__init__", mentions=("_cuda_graph_runner",)) for module, name in _GRAPHS),
    Name("sglang.srt.model_executor.runner.base_runner", "BaseRunner.__init__", mentions=("model_runner",)),
    Name(_BREAKABLE, "eager_on_graph", ("fn",), mentions=("_current_capture_var", "_end_current_segment")),
    # Between two segments it is None.
    Name(_BREAKABLE, "BreakableCUDAGraphCapture._end_current_segment", mentions=("_current_graph",)),
    *(
        Name(_UPDATES, f"SchedulerWeightUpdaterManager.{name}", ("self", "recv_req"))
        for name in ("begin_weight_update", "end_weight_update", "update_weights_from_ipc")
    ),
    # Of each runner: whether it succeeded, and why not.
    *(
        Name(f"{_EXPORT.rpartition('.')[0]}.weight_updater", f"WeightUpdater.{name}", given)
        for name, given in (
            ("update_weights_from_disk", ("self", "model_path", "load_format")),
            ("update_weights_from_tensor", ("self", "named_tensors")),
            ("load_weights_from_distributed", ("self", "named_tensors")),
        )
    ),
    *(
        Name(
            "sglang.srt.managers.tokenizer_control_mixin", f"TokenizerControlMixin.{name}_memory_occupation", ("self",)
        )
        for name in ("release", "resume")
    ),
    # Both write between the two ends of a session, which begin_weight_update opens.
    *(
        Name(
            _UPDATES,
            f"SchedulerWeightUpdaterManager.update_weights_from_{name}",
            ("self", "recv_req"),
            mentions=("_session",),
        )
        for name in ("distributed", "tensor")
    ),
    Name(_EXPORT, "WeightExporter.get_weights_by_name", ("self", "name")),
    Name(_EXPORT, "WeightExporter.send_weights_to_remote_instance", ("self",)),
    Name("sglang.srt.managers.scheduler", "Scheduler.get_internal_state", ("self", "recv_req")),
)
