"""headrace inside SGLang: its offloader, and the hooks around the functions that load, capture, replay and write.

SGLang's model runner makes an offloader before it builds the model; the model code passes layers to it in
``make_layers``; ``load_model`` ends with its ``post_init``. SGLang does not order copies around CUDA graphs, so the
capture and the replay of a graph are hooked. SGLang calls ``model.forward`` and the forward of the module that holds
the layers directly, which runs no hooks of modules (``EngineTraits.calls_forward``).
"""

from __future__ import annotations

import inspect
import logging
import os
import pkgutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import sglang
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import breakable_cuda_graph
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.srt.utils.offloader import NoopOffloader, get_offloader
from torch import nn
from torch.distributed import FileStore, PrefixStore, ProcessGroup  # type: ignore[attr-defined,unused-ignore]

from headrace.adapters.engine_interface import require_hooks, version_number
from headrace.adapters.sglang import weight_updates
from headrace.adapters.sglang.keys import VARIABLE, parse_keys, read_options
from headrace.config import Budget
from headrace.errors import OptionError, StateError
from headrace.flags import EngineOptions
from headrace.model.records import Inventory
from headrace.offloaders.layerwise import EngineOffloader, EngineTraits, lookup_rule
from headrace.ranks.group import RankGroup
from headrace.runtime.prepare import open_ranks

logger = logging.getLogger("sglang.headrace")  # SGLang's servers print the records of their own loggers

_VERSION = "0.5.23"  # the one that was tried

_keys: Mapping[str, Any] = {}  # of HEADRACE_SGLANG


def register_hooks(value: str) -> None:
    """Register all hooks with SGLang, which applies them once every plugin is loaded.

    Args:
        value: value of ``HEADRACE_SGLANG``.

    Raises:
        OptionError, OptionTypeError: this SGLang is not supported, or ``value`` is invalid; see the message.
    """
    global _keys
    version = sglang.__version__
    if version_number(version) != version_number(_VERSION):
        raise OptionError(
            f"SGLang {version} has not been tried with headrace: expected {_VERSION}; install it "
            f"(pip install sglang=={_VERSION}), or unset {VARIABLE} to run SGLang without headrace"
        )
    hooks: dict[str, tuple[str, ...]] = dict.fromkeys(_HOOKS, ())
    require_hooks(f"SGLang {version}", hooks, f"SGLang {_VERSION}, or unset {VARIABLE} to run it without")
    _keys = parse_keys(value)
    for target, (hook, kind) in _HOOKS.items():
        HookRegistry.register(target, hook, kind)


class SGLangOffloader(EngineOffloader):
    """SGLang's offloader, of the one model runner that loads a model with it."""

    forbid_copy_engine_usage = True  # small copies of SGLang's would queue behind units

    def __init__(self, options: EngineOptions) -> None:
        # Not at the top of this file: plugins are loaded before SGLang's layers can be imported.
        from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

        super().__init__(
            options.policy,  # type: ignore[arg-type]
            self._runner_model,
            EngineTraits(
                is_lookup=lookup_rule(VocabParallelEmbedding, ParallelLMHead),
                announces_replays=True,
                break_capture=_break_capture,
                calls_forward=True,
                copies_limited=True,
            ),
            measure_stalls=options.measure_stalls,
        )
        self.options = options
        self._runner: Any = None

    def wrap_modules(  # type: ignore[override]
        self, all_modules_generator: Iterable[nn.Module], submodule_accessor: Any = None, *_: Any, **__: Any
    ) -> list[nn.Module]:
        """Take layers over. SGLang's other arguments select parts of each layer; headrace has ``params`` for that."""
        return super().wrap_modules(all_modules_generator)

    def set_runner(self, runner: Any, ranks: RankGroup | None) -> None:
        """``runner``: the one that loads the model; ``ranks``: those that share the store."""
        self._runner, self._ranks = runner, ranks

    def _runner_model(self) -> nn.Module:
        if self._runner is None:
            raise StateError(
                f"SGLang has loaded a model without ModelRunner.load_model, which headrace relies on; unset {VARIABLE}"
            )
        model: nn.Module = self._runner.model
        return model

    def _take_inventory(self, model: nn.Module) -> Inventory:
        inventory = super()._take_inventory(model)
        # SGLang saves and restores buffers when it releases memory.
        buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
        kept = tuple(s for s in inventory.storages if buffers.isdisjoint(s.names))
        return replace(inventory, storages=kept)


# -- making and loading ------------------------------------------------------------------------------------------------


def _create_offloader() -> Any:
    """Create the offloader in place of SGLang's function, before the model is built.

    Raises:
        OptionError, OptionTypeError: options that contradict one another, or features that headrace cannot run with.
        StateError: SGLang could not apply a hook.
    """
    _require_hooks()
    context = get_context()
    options = read_options(_keys, context.config_leaf)
    if options.policy is None:
        logger.warning(
            f"{VARIABLE} is set, and headrace has nothing to do: neither an offload flag (--offload-group-size, "
            f"--cpu-offload-gb) nor device_memory is given; all weights stay on the device"
        )
        return NoopOffloader()
    if isinstance(options.policy, Budget):
        # Model code asks for SGLang's flags before it fuses across layers. Nothing else reads this one from here on.
        context.override("headrace", offload_group_size=1)
    return SGLangOffloader(options)


def _require_hooks() -> None:
    """SGLang only logs a hook that it could not apply."""
    for target in _HOOKS:
        found = pkgutil.resolve_name(target)
        if inspect.unwrap(found) is found:
            raise StateError(f"SGLang has not hooked {target}: see its log above, or unset {VARIABLE}")


def _set_offloader(original: Callable[[Any], None], instance: Any) -> None:
    if not isinstance(instance, SGLangOffloader | NoopOffloader):
        raise StateError(
            f"{VARIABLE} is set, and {type(instance).__module__}.{type(instance).__name__} would be SGLang's "
            f"offloader: another plugin replaces create_offloader; leave one of the two out (SGLANG_PLUGINS), or unset "
            f"{VARIABLE}"
        )
    original(instance)


def _load_model(original: Callable[[Any], None], runner: Any) -> None:
    offloader = get_offloader()
    if not isinstance(offloader, SGLangOffloader):
        original(runner)
        return
    if getattr(runner, "is_draft_worker", False):
        raise StateError(f"a draft model is loaded with the offloaded one, which headrace refuses; unset {VARIABLE}")
    with open_ranks(_replica_group() if offloader.options.mode == "shm_cpu" else None) as ranks:
        offloader.set_runner(runner, ranks)
        original(runner)
    for line in offloader.summary():  # raises if nothing is offloaded
        logger.info(f"headrace: {line}")
    runner.headrace_offloader = offloader


def _replica_group() -> ProcessGroup:
    """The data-parallel ranks of this launch, which are separate worlds and connect by a file, as SGLang's own do."""
    parallel = get_parallel()
    path = os.path.join(tempfile.gettempdir(), f"{os.environ['SGLANG_RUN_ID']}-headrace")
    store = FileStore(path, parallel.num_dp_ranks)
    return ProcessGroup(PrefixStore("headrace", store), parallel.dp_rank, parallel.num_dp_ranks)


# -- running ----------------------------------------------------------------------------------------------------------


def _capture_one(
    original: Callable[..., None],
    backend: Any,
    shape_key: Any,
    forward_fn: Callable[[], Any],
    capture_inputs: Any = None,
    post_warmup_hook: Callable[[], None] | None = None,
) -> None:
    offloader = weight_updates.offloader_of(backend._cuda_graph_runner.model_runner)
    if offloader is None:
        return original(backend, shape_key, forward_fn, capture_inputs, post_warmup_hook)

    def before_capture() -> None:
        if post_warmup_hook is not None:
            post_warmup_hook()
        offloader.sync_prev_onload()

    try:
        # Each forward joins its own copies, also in the capture, which includes the module that holds the layers.
        original(backend, shape_key, forward_fn, capture_inputs, before_capture)
    finally:
        offloader.prepare_next()
    offloader.require_all_ran()


def _replay(original: Callable[..., Any], backend: Any, *args: Any, **kwargs: Any) -> Any:
    offloader = weight_updates.offloader_of(backend._cuda_graph_runner.model_runner)
    if offloader is None:
        return original(backend, *args, **kwargs)
    offloader.require_usable()
    offloader.sync_prev_onload()
    try:
        return original(backend, *args, **kwargs)
    finally:  # the first copies of the next forward start, during sampling and scheduling
        offloader.prepare_next()


def _break_capture(action: Callable[[], None]) -> bool:
    """Run ``action`` between two segments of a breakable CUDA graph, as attention is; False if none is captured."""
    capture = breakable_cuda_graph._current_capture_var.get()
    if capture is None or capture._current_graph is None:  # between two segments
        return False
    breakable_cuda_graph.eager_on_graph(action)()
    return True


def _forward(original: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(runner, forward_batch, *args, **kwargs)
    offloader = weight_updates.offloader_of(runner)
    if offloader is not None and not forward_batch.forward_mode.is_idle():
        offloader.require_all_ran()  # before the first result counts, where no graph was captured
    return result


# -- calls that would write or read slots -----------------------------------------------------------------------------


def _refuse_memory(original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any) -> Any:
    """In the process that gets requests: SGLang has no answer for a scheduler that refuses this one."""
    if read_options(_keys, partial(getattr, manager.server_args)).policy is None:
        return original(manager, *args, **kwargs)
    raise OptionError(
        f"{original.__name__} is refused: it needs --enable-memory-saver, whose memory of weights headrace could not "
        f"fill again; stop the server, or run it without {VARIABLE}"
    )


def _check_weights(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    if weight_updates.offloader_of(runner) is not None:  # SGLang answers with the message
        raise StateError(
            "check_weights would read slots, which hold other layers' weights: headrace offloads this model"
        )
    return original(runner, *args, **kwargs)


def _get_weights_by_name(original: Callable[..., Any], exporter: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    if _has_slots(exporter.get_model()):
        logger.error(f"the weights of {name} are not returned: they may be in a slot, which other layers use, too")
        return None
    return original(exporter, name, *args, **kwargs)


def _send_weights(original: Callable[..., Any], exporter: Any, *args: Any, **kwargs: Any) -> Any:
    if _has_slots(exporter.get_model()):
        return False, "weights would be sent from slots, which hold other layers' weights: headrace offloads this model"
    return original(exporter, *args, **kwargs)


def _has_slots(model: nn.Module) -> bool:
    offloader = get_offloader()
    return isinstance(offloader, SGLangOffloader) and offloader._runner_model() is model


def _internal_state(result: Any, scheduler: Any, recv_req: Any) -> Any:
    """``/server_info`` shows the metrics of the offload."""
    offloader = weight_updates.offloader_of(scheduler.tp_worker.model_runner)
    if offloader is not None:
        result.internal_state["headrace"] = offloader.metrics()
    return result


_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_FULL = "sglang.srt.model_executor.runner_backend.full_cuda_graph_backend.FullCudaGraphBackend"
_BREAKABLE = "sglang.srt.model_executor.runner_backend.breakable_cuda_graph_backend.BreakableCudaGraphBackend"
_UPDATES = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_WRITER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
_REQUESTS = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin"
_EXPORT = "sglang.srt.model_executor.model_runner_components.weight_exporter.WeightExporter"
_HOOKS: Mapping[str, tuple[Callable[..., Any], HookType]] = {
    "sglang.srt.utils.offloader.create_offloader": (_create_offloader, HookType.REPLACE),
    "sglang.srt.utils.offloader.set_offloader": (_set_offloader, HookType.AROUND),
    f"{_RUNNER}.load_model": (_load_model, HookType.AROUND),
    f"{_RUNNER}.forward": (_forward, HookType.AROUND),
    f"{_RUNNER}.check_weights": (_check_weights, HookType.AROUND),
    f"{_FULL}.capture_one": (_capture_one, HookType.AROUND),
    f"{_FULL}.replay": (_replay, HookType.AROUND),
    f"{_BREAKABLE}.capture_one": (_capture_one, HookType.AROUND),
    f"{_BREAKABLE}.replay": (_replay, HookType.AROUND),
    f"{_UPDATES}.begin_weight_update": (weight_updates.begin_update, HookType.AROUND),
    f"{_UPDATES}.end_weight_update": (weight_updates.end_update, HookType.AROUND),
    f"{_UPDATES}.update_weights_from_tensor": (weight_updates.note_flush, HookType.AROUND),
    f"{_UPDATES}.update_weights_from_distributed": (weight_updates.note_flush, HookType.AROUND),
    f"{_UPDATES}.update_weights_from_ipc": (weight_updates.refuse_ipc, HookType.AROUND),
    f"{_WRITER}.update_weights_from_disk": (weight_updates.update_from_disk, HookType.AROUND),
    f"{_WRITER}.update_weights_from_tensor": (weight_updates.write_in_session, HookType.AROUND),
    f"{_WRITER}.load_weights_from_distributed": (weight_updates.write_in_session, HookType.AROUND),
    f"{_REQUESTS}.release_memory_occupation": (_refuse_memory, HookType.AROUND),
    f"{_REQUESTS}.resume_memory_occupation": (_refuse_memory, HookType.AROUND),
    f"{_EXPORT}.get_weights_by_name": (_get_weights_by_name, HookType.AROUND),
    f"{_EXPORT}.send_weights_to_remote_instance": (_send_weights, HookType.AROUND),
    "sglang.srt.managers.scheduler.Scheduler.get_internal_state": (_internal_state, HookType.AFTER),
}
