"""What headrace relies on of vLLM: names, parameters, fields, and calls.

The stand-in is held to this table with every commit, and vLLM itself by ``scripts/test-vllm-source``.
"""

from __future__ import annotations

from dataclasses import replace

from engine_names import Name
from headrace.adapters.vllm.interface import OLDEST_WITH_CACHE

_OFFLOADER = "vllm.model_executor.offloader.base"
_WORKER = "vllm.v1.worker.gpu_worker"
_RUNNERS = ("vllm.v1.worker.gpu.model_runner", "vllm.v1.worker.gpu_model_runner")  # the default first
_GRAPHS = "vllm.v1.worker.gpu.cudagraph_utils"
_BREAKABLE = "vllm.compilation.breakable_cudagraph"
_GROUPS = "vllm.distributed.parallel_state"
_MOE = "vllm.model_executor.layers.fused_moe"
_TRITON = f"{_MOE}.experts.triton_moe"
_PACKED = f"{_MOE}.experts.gpt_oss_triton_kernels_moe"
_MODELS = "vllm.model_executor.models.utils"
_LOADING = "vllm.model_executor.model_loader.utils"
_AROUND_CAPTURE = ("sync_prev_onload", "join_after_forward")
_PARALLEL = ("data_parallel_master_port", "data_parallel_rank_local", "enable_dbo", "enable_eplb", "ubatch_size")
_VLLM = (
    "additional_config", "compilation_config", "load_config", "model_config", "offload_config", "parallel_config",
    "speculative_config", "weight_transfer_config",
)  # fmt: skip
_COMPILATION = ("mode", "splitting_ops", "use_inductor_graph_partition")
_PREFETCH = ("offload_group_size", "offload_num_in_group", "offload_params", "offload_prefetch_step")
_RELOAD = "vllm.model_executor.model_loader.reload"
_TUNING = ("w1_shape", "w2_shape", "top_k", "dtype", "M", "block_shape")
_APPLY = (
    "self", "output", "hidden_states", "w1", "w2", "topk_weights", "topk_ids", "activation", "global_num_experts",
    "expert_map",
)  # fmt: skip
_FUSED = ("output_tensor", "hidden_states", "w1", "w2", "routing_data", "gather_indx", "scatter_indx", "topk")
_ALIGN = ("topk_ids", "block_size", "num_experts", "expert_map", "pad_sorted_ids", "ignore_invalid_experts")
NAMES = (
    Name(_OFFLOADER, "get_offloader", ()),
    Name(_OFFLOADER, "set_offloader", ("instance",)),
    Name(_OFFLOADER, "NoopOffloader"),
    Name(_OFFLOADER, "BaseOffloader.wrap_modules", ("self", "modules_generator")),
    Name(_OFFLOADER, "BaseOffloader.post_init", ("self",)),
    Name(_OFFLOADER, "BaseOffloader.sync_prev_onload", ("self",)),
    Name(_OFFLOADER, "BaseOffloader.join_after_forward", ("self",)),
    Name(
        _MODELS, "make_layers", ("num_hidden_layers", "layer_fn", "prefix"), mentions=("get_offloader", "wrap_modules")
    ),
    Name("vllm.model_executor.layers.vocab_parallel_embedding", "VocabParallelEmbedding"),
    Name("vllm.model_executor.layers.vocab_parallel_embedding", "ParallelLMHead"),
    Name(_WORKER, "Worker.__init__", ("self", "vllm_config")),
    Name("vllm.v1.worker.worker_base", "WorkerBase.__init__", mentions=("rank", "vllm_config")),
    Name(_WORKER, "Worker.load_model", ("self", "load_dummy_weights"), mentions=("model_runner", "load_model")),
    Name(_WORKER, "Worker.init_device", ("self",), mentions=("device",)),
    # The model runs for the first time inside it.
    Name(_WORKER, "Worker.determine_available_memory", ("self",), mentions=("profile_run",)),
    Name(_WORKER, "Worker.compile_or_warm_up_model", ("self",)),
    Name("vllm.v1.worker.worker_base", "WorkerBase.apply_model", ("self", "fn"), mentions=("get_model",)),
    Name(_WORKER, "Worker.execute_model", ("self", "scheduler_output")),
    Name(_WORKER, "Worker.sample_tokens", ("self",)),
    Name(_WORKER, "Worker.sleep", ("self", "level")),
    Name(_WORKER, "Worker.wake_up", ("self", "tags")),
    Name(_WORKER, "Worker.reload_weights"),
    # What has another tag than those that are kept is unmapped without a copy.
    *(
        Name("vllm.device_allocator.cumem", f"CuMemAllocator.{name}", mentions=("pointer_to_data", "tag"))
        for name in ("sleep", "wake_up")
    ),
    Name("vllm.device_allocator.cumem", "CuMemAllocator.instance"),
    # How much of a module's weights was given.
    Name(_RELOAD + ".layerwise", "get_layerwise_info", ("layer",), since=OLDEST_WITH_CACHE),
    Name(_RELOAD + ".types", "LayerReloadingInfo", fields=("load_numel", "load_numel_total"), since=OLDEST_WITH_CACHE),
    Name(_WORKER, "Worker.save_tensorized_model"),
    *(
        Name(runner, "GPUModelRunner.load_model", ("self", "load_dummy_weights"), mentions=("model_memory_usage",))
        for runner in _RUNNERS
    ),
    *(Name(runner, "GPUModelRunner.get_model", ("self",)) for runner in _RUNNERS),
    # vLLM announces every replay; the prefetcher relies on this.
    Name("vllm.compilation.cuda_graph", "CUDAGraphWrapper.__call__", mentions=_AROUND_CAPTURE),
    Name(_GRAPHS, "CudaGraphManager.capture", mentions=_AROUND_CAPTURE),
    Name(_GRAPHS, "CudaGraphManager.run_fullgraph", mentions=("sync_prev_onload",)),
    Name(_BREAKABLE, "BreakableCUDAGraphCapture.current", (), since_later=True),
    Name(_BREAKABLE, "BreakableCUDAGraphCapture.add_eager", ("self", "fn"), since_later=True),
    # Between two segments it is false.
    Name(_BREAKABLE, "BreakableCUDAGraphCapture._end_segment", mentions=("_capturing",), since_later=True),
    # What repacks weights runs through the method of each module, where the result leaves the device.
    Name(_LOADING, "process_weights_after_loading", mentions=("quant_method", "process_weights_after_loading")),
    # vLLM moves the replacement of an offloaded parameter off the device again.
    Name(_LOADING, "device_loading_context", mentions=("_vllm_is_uva_offloaded",)),
    # Kernels of experts read weights that have the same mark once per expert.
    Name(f"{_MOE}.fused_moe", "_weights_host_resident", mentions=("_vllm_is_uva_offloaded",), since=(0, 33)),
    # Cached experts: the weights and numbers that a kernel is given are replaced, and how it is tuned is kept.
    *(
        replace(name, since=OLDEST_WITH_CACHE)
        for name in (
            Name(_MOE, "override_config", ("config",)),
            Name(f"{_MOE}.fused_moe", "try_get_optimal_moe_config", _TUNING),
            Name(
                f"{_MOE}.modular_kernel",
                "FusedMoEKernelModularImpl._fused_experts",
                mentions=("fused_experts", "apply"),
            ),
            Name(_TRITON, "TritonExperts.apply", _APPLY, mentions=("try_get_optimal_moe_config", "quant_config")),
            Name(_TRITON, "TritonExperts.moe_problem_size", ("self", "a1", "w1", "w2", "topk_ids")),
            Name(f"{_MOE}.experts.marlin_moe", "MarlinExperts.apply", _APPLY),
            Name(f"{_MOE}.experts.marlin_moe", "moe_align_block_size", _ALIGN),
            Name(_PACKED, "triton_kernel_fused_experts", _FUSED),
            Name(_PACKED, "triton_kernels_version"),
            Name(_PACKED, "OAITritonExperts.apply", _APPLY, mentions=("triton_kernel_fused_experts", "quant_config")),
            Name(
                _PACKED, "OAITritonMxfp4ExpertsMonolithic.apply", mentions=("triton_kernel_moe_forward", "quant_config")
            ),
            Name(_PACKED, "triton_kernel_moe_forward", mentions=("triton_kernel_fused_experts",)),
            Name(f"{_MOE}.config", "FusedMoEQuantConfig", fields=("_a1", "_a2", "_w1", "_w2")),
            Name(f"{_MOE}.routed_experts", "RoutedExperts.__init__", mentions=("quant_method", "moe_config")),
            Name(f"{_MOE}.config", "FusedMoEParallelConfig.use_all2all_kernels"),
            Name(f"{_MOE}.config", "FusedMoEParallelConfig", fields=("enable_eplb",)),
        )
    ),
    *(Name(_GROUPS, name, ()) for name in ("get_dp_group", "get_tp_group", "get_world_group")),
    Name(_GROUPS, "GroupCoordinator.__init__", mentions=("cpu_group", "rank_in_group", "world_size")),
    Name(_GROUPS, "GroupCoordinator.broadcast_object", ("self", "obj", "src")),
    Name("vllm.logger", "init_logger", ("name",)),
    Name("vllm.config.vllm", "VllmConfig", fields=_VLLM),
    # The additional configuration is part of the compile cache's key.
    Name("vllm.config.vllm", "VllmConfig.compute_hash", ("self",), mentions=("additional_config",)),
    Name("vllm.config.compilation", "CompilationConfig", fields=_COMPILATION),
    Name("vllm.config.parallel", "ParallelConfig", fields=_PARALLEL),
    Name("vllm.config.load", "LoadConfig", fields=("load_format",)),
    Name("vllm.config.model", "ModelConfig", fields=("multimodal_config", "quantization")),
    Name("vllm.config.model", "ModelConfig.architecture"),
    Name("vllm.config.multimodal", "MultiModalConfig", fields=("mm_encoder_only",)),
    Name("vllm.config.speculative", "SpeculativeConfig", fields=("rejection_sample_method",)),
    Name("vllm.config.offload", "OffloadConfig", fields=("offload_backend", "prefetch", "uva")),
    Name("vllm.config.offload", "UVAOffloadConfig", fields=("cpu_offload_gb", "cpu_offload_params")),
    Name("vllm.config.offload", "PrefetchOffloadConfig", fields=_PREFETCH),
)
