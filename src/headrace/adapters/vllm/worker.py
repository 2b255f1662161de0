"""A worker of vLLM whose offloader is headrace's.

vLLM's runners set an offloader, build the model, whose code calls the offloader in ``make_layers``, and call its
``post_init``; the graph code calls it to order copies. This worker sets headrace's offloader before the model is built
and calls ``post_init`` as soon as the weights are final. It relies on neither call of the runners: before vLLM 0.28 the
second runner, which is the default now, made none.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import vllm
from prometheus_client import Counter
from torch import nn
from torch.distributed import PrefixStore, ProcessGroup, Store, TCPStore  # type: ignore[attr-defined,unused-ignore]
from vllm.distributed.parallel_state import get_dp_group, get_tp_group, get_world_group
from vllm.logger import init_logger
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.offloader.base import get_offloader, set_offloader
from vllm.v1.worker import gpu_worker

from headrace.adapters.engine_interface import all_or_none, gathered, version_number
from headrace.adapters.vllm.interface import NEWEST, OLDEST_WITH_CACHE, require_supported
from headrace.adapters.vllm.options import read_options, refuse_unsupported
from headrace.adapters.vllm.sleep import loading_allowed, not_saved, own_allocations, refuse_loading
from headrace.config import Budget, peer_timeout_s
from headrace.errors import OptionError, OutsideAccessError, PeerError, StateError
from headrace.experts.rows import ExpertKernels
from headrace.formatting import format_size
from headrace.lifetime.sleeping import end_sleep, fall_asleep, refillable_memory
from headrace.model.inventory import without_lora
from headrace.offloaders.layerwise import EngineOffloader, EngineTraits, lookup_rule
from headrace.plan.rates import Rates
from headrace.ranks.group import GRACE_S, RankGroup, call_within, json_digest
from headrace.runtime.prepare import open_ranks
from headrace.transfer.link_rates import COPY_SIZES
from headrace.transfer.measuring import rates_among

if TYPE_CHECKING:
    from headrace.experts.counts import CountsReader

_LOG_EVERY_S = 10.0  # as vLLM's own line of statistics

logger = init_logger("vllm.headrace")  # vLLM prints records of its own loggers and their children


_in_force: weakref.ref[EngineOffloader] | None = None  # of the process, as vLLM's own

# OffloadingWorker is mixed into a worker class of vLLM; type checkers see the one for GPUs.
_Base: Any = gpu_worker.Worker if TYPE_CHECKING else object


class OffloadingWorker(_Base):  # type: ignore[misc,unused-ignore]
    """Mixed in before a worker class of vLLM, it makes ``get_offloader()`` return headrace's offloader."""

    offloader_class = EngineOffloader

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        """Like vLLM's.

        Raises:
            OptionError, OptionTypeError: this vLLM is not supported, or the flags are invalid; see the message.
        """
        require_supported(vllm.__version__)
        self._options = read_options(vllm_config.offload_config, vllm_config.additional_config)
        self._announces = False
        self._link_bytes_per_s: float | None = None  # of this rank while others copy; measured for a budget
        self._hits: _HitLog | None = None
        if self._options.policy is not None:
            _refuse_second_engine()  # before its runner replaces the offloader that graphs of the first engine call
            refuse_unsupported(vllm_config, self._options.policy)
            self._announces = _keep_units_out_of_pieces(vllm_config.compilation_config)
            # Changed below, and the user may start another engine with the same dict.
            vllm_config.additional_config = dict(vllm_config.additional_config)
        self._offloader: EngineOffloader | None = None
        super().__init__(vllm_config, *args, **kwargs)

    def load_model(self, **kwargs: Any) -> None:
        """Build and load the model with headrace's offloader.

        Raises:
            OptionError: an impossible selection or budget.
            StateError: another offloader is set.
        """
        if self._options.policy is None:
            logger.warning(
                "headrace has nothing to do: neither an offload flag (--offload-group-size, --cpu-offload-gb) nor "
                "headrace.device_memory is set; all weights stay on the GPU"
            )
            super().load_model(**kwargs)
            return
        _refuse_other_offloader(get_offloader())
        replicas = None
        if self._options.mode == "shm_cpu":
            replicas = _replica_group(self._options.replicas, self.vllm_config.parallel_config, self.rank)
        with open_ranks(replicas) as ranks:
            rates = self._rates_of_ranks(ranks) if isinstance(self._options.policy, Budget) else None
            self._offloader = self.offloader_class(
                self._options.policy,
                self.model_runner.get_model,
                EngineTraits(
                    is_lookup=lookup_rule(VocabParallelEmbedding, ParallelLMHead),
                    plain_name=without_lora,
                    announces_replays=self._announces,
                    break_capture=_break_capture,
                    expert_kernels=_expert_kernels(),
                ),
                ranks=ranks,
                rates=rates,
                measure_stalls=self._options.measure_stalls,
            )
            with self._in_force(self._offloader):
                super().load_model(**kwargs)
        for line in self._offloader.summary():
            logger.info(f"headrace: {line}")
        if self._offloader.plan.cached:
            reader = self._offloader.counts_reader()
            self._hits = None if reader is None else _HitLog(reader)

    def _rates_of_ranks(self, replicas: RankGroup | None) -> Rates | None:
        """The rates for planning a budget while other ranks copy, too; ``None``: there are no others."""
        engine = get_world_group()
        # Of engines that vLLM runs separately, but which share one copy.
        others = None if get_dp_group().world_size > 1 else replicas
        if engine.world_size == 1 and others is None:
            return None

        def exchange(value: Any) -> list[Any]:
            found = gathered(value, engine)
            return found if others is None else list(chain.from_iterable(others.exchange("rates", found)))

        # Kernels may have been measured on each host.
        rates: Rates = get_tp_group().broadcast_object(rates_among(self.device, exchange), src=0)
        self._link_bytes_per_s = rates.copy_bytes_per_s(COPY_SIZES[-1])
        logger.info(f"headrace: planned for {rates.machine}, {self._link_bytes_per_s / 1e9:.1f} GB/s each")
        return rates

    @contextmanager
    def _in_force(self, offloader: EngineOffloader) -> Iterator[None]:
        """Within, ``get_offloader()`` is ``offloader``, and loading ends with its ``post_init``.

        If loading fails, vLLM's former offloader is set again, for the next model of this process.
        """
        runner = self.model_runner
        load = runner.load_model

        def load_and_offload(*args: Any, **kwargs: Any) -> None:
            load(*args, **kwargs)
            # No effect if the runner has called it, as the second one does since 0.28. It runs inside the memory pool
            # that vLLM loads into.
            offloader.post_init()
            runner.model_memory_usage += offloader.added_device_bytes
            refuse_loading(runner.get_model())
            # Compiled code waits for the units of the plan it was traced with. vLLM drops all guards, so with another
            # plan it would read slots that no copy has filled. The additional configuration is part of the key of
            # vLLM's compile cache, so the units are put there. Nothing else of headrace's is: a compiler chooses
            # kernels by measured times, so an engine that compiled the same code again could round differently from
            # its reference, which copies nothing.
            units = [(unit.module_fqn, [entry.storage for entry in unit.entries]) for unit in offloader.plan.units]
            _require_same_units([unit.module_fqn for unit in offloader.plan.units])
            self.vllm_config.additional_config.pop("headrace", None)
            self.vllm_config.additional_config["headrace_units"] = json_digest(units)

        global _in_force
        self._former = get_offloader()
        set_offloader(offloader)
        _in_force = weakref.ref(offloader)
        runner.load_model = load_and_offload
        try:
            yield
        except BaseException:
            self._unset_offloader()
            raise
        finally:
            del runner.load_model  # from the instance: the method of the class is found again

    def _unset_offloader(self) -> None:
        global _in_force
        if self._offloader is not None:
            _in_force = None
            if get_offloader() is self._offloader:
                set_offloader(self._former)
        self._offloader = None

    def shutdown(self) -> None:
        """Like vLLM's; after it another engine of this process may set its own offloader."""
        self._unset_offloader()
        if shut_down := getattr(super(), "shutdown", None):
            shut_down()

    def determine_available_memory(self, *args: Any, **kwargs: Any) -> Any:
        """Like vLLM's, in which a worker on a GPU runs its model for the first time.

        Raises:
            OutsideAccessError: a model that is not compiled uses an offloaded weight outside of its module's forward.
        """
        # Hooks see a module run, but not another module that reads its weights from a slot, which may hold any layer.
        is_compiled = self.vllm_config.compilation_config.mode != 0
        try:
            with nullcontext() if self._offloader is None or is_compiled else self._offloader.as_placeholders():
                return super().determine_available_memory(*args, **kwargs)
        except OutsideAccessError:
            self._unset_offloader()
            raise

    def compile_or_warm_up_model(self, *args: Any, **kwargs: Any) -> Any:
        """Like vLLM's, the last step before it serves; a worker on a GPU has run its model by then.

        Raises:
            StateError: the model does not run an offloaded module.
        """
        result = super().compile_or_warm_up_model(*args, **kwargs)
        if self._offloader is not None and self._offloader.has_run:
            self._require_all_ran(self._offloader)
        return result

    def _require_all_ran(self, offloader: EngineOffloader) -> None:
        try:
            offloader.require_all_ran()
        except StateError:
            self._unset_offloader()
            raise

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Like vLLM's; then the first copies of the next forward start, during sampling and scheduling.

        Raises:
            StateError: the weights are asleep; another engine of this process has replaced the offloader; or the first
                run of the model, which on a CPU is the first step, does not run an offloaded module.
        """
        if self._offloader is not None:
            self._offloader.require_usable()
        if self._offloader is not None and get_offloader() is not self._offloader:
            raise StateError(
                "another engine of this process has replaced headrace's offloader, which vLLM asks before it replays a "
                "graph: run each engine in a separate process"
            )
        try:
            result = super().execute_model(scheduler_output, *args, **kwargs)
        finally:  # also after an interrupt: the next replay needs the first units in their slots
            if self._offloader is not None:
                self._offloader.prepare_next()
        has_tokens = getattr(scheduler_output, "total_num_scheduled_tokens", 1) > 0
        if self._offloader is not None and has_tokens:
            self._require_all_ran(self._offloader)
        if self._hits is not None:
            self._hits.poll()
        return result

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Like vLLM's; graphs that are replayed inside it belong to a draft model, whose weights are not offloaded."""
        # Without this, each replay of the draft model would copy the first units of the offloaded model again.
        with nullcontext() if self._offloader is None else self._offloader.replays_of_others():
            return super().sample_tokens(*args, **kwargs)

    def headrace_stats(self) -> dict[str, Any]:
        """The plan and the counters in plain numbers, for ``collective_rpc("headrace_stats")``."""
        if self._offloader is None:
            return {}
        return {
            "offloader": type(get_offloader()).__name__,
            **self._offloader.metrics(),
            "planned_link_bytes_per_s": self._link_bytes_per_s,
        }

    def sleep(self, level: int = 1) -> None:
        """Like vLLM's; level 2 keeps the weights, too, which lie in host memory anyway.

        Raises:
            LimitError: the host has no memory for resident weights; nothing was changed.
        """
        if self._offloader is None:
            super().sleep(level)
            return
        if level > 1:
            logger.info(f"headrace: sleep level {level} keeps the weights in host memory, as level 1 does")
        life = self._offloader.life
        own = own_allocations(refillable_memory(life))
        moved = fall_asleep(life, own)
        logger.info(f"headrace: {format_size(moved)} of resident weights were copied to host memory")
        with not_saved(own.values()):
            super().sleep(1)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Like vLLM's; with the weights' memory come the weights as they were before :meth:`sleep`."""
        super().wake_up(tags)
        if self._offloader is not None and (tags is None or "weights" in tags):
            moved = end_sleep(self._offloader.life)
            logger.info(f"headrace: {format_size(moved)} of resident weights were copied back")

    def discard(self, tags: tuple[str, ...]) -> None:
        """Like vLLM's, where it has one.

        Raises:
            StateError: weights are to be discarded.
        """
        if "weights" in tags:
            self._refuse_while_offloaded(
                "a discard of weights would lose those that headrace does not hold; use sleep(), which keeps them"
            )
        super().discard(tags)

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """Like vLLM's; the weights are the old ones until all new ones are loaded.

        Raises:
            OptionError: they are stored in a way that takes no new values, or new ones are incomplete.
            LimitError: the host has no memory for them beside the old ones.
            StateError: the weights are asleep.
        """
        with self._new_weights("reload_weights"):
            super().reload_weights(*args, **kwargs)

    def reset_weights(self) -> None:
        """Like vLLM's, where it has one; errors as those of :meth:`reload_weights`."""
        with self._new_weights("reset_weights"):
            super().reset_weights()

    @contextmanager
    def _new_weights(self, call: str) -> Iterator[None]:
        """Within, vLLM writes to the weights of the model, which get the new values at the end, or none of them."""
        if self._offloader is None:
            yield
            return
        is_quantised = self.vllm_config.model_config.quantization is not None
        gather = partial(gathered, group=get_world_group())
        with all_or_none(self._offloader, call, gather), loading_allowed(self.model_runner.get_model(), is_quantised):
            yield

    def save_tensorized_model(self, *args: Any, **kwargs: Any) -> None:
        """Like vLLM's; refused while weights are offloaded, because it reads parameters, and not ``state_dict()``."""
        self._refuse_while_offloaded(
            "save_tensorized_model would save the current contents of slots; save_sharded_state saves the weights "
            "themselves, or run this engine without headrace to serialise it"
        )
        super().save_tensorized_model(*args, **kwargs)

    def apply_model(self, fn: Callable[[nn.Module], Any]) -> Any:
        """Like vLLM's: ``fn`` of the model. It may read offloaded weights by ``state_dict()`` alone.

        Raises:
            OutsideAccessError: it reads or writes an offloaded weight.
        """
        with nullcontext() if self._offloader is None else self._offloader.as_placeholders():
            return super().apply_model(fn)

    def compute_weight_checksums(self) -> dict[str, str]:
        """Like vLLM's, where it has one, over the bytes in the store: a slot may hold those of another layer."""
        if self._offloader is None:
            return super().compute_weight_checksums()  # type: ignore[no-any-return]
        runner = self.model_runner
        model = runner.get_model()
        runner.get_model = lambda: _StoredWeights(model)
        try:
            return super().compute_weight_checksums()  # type: ignore[no-any-return]
        finally:
            del runner.get_model

    def checkpoint_prepare(self) -> None:
        """Like vLLM's, where it has one; refused while weights are offloaded."""
        self._refuse_while_offloaded(
            "checkpoint_prepare prepares the process for a CUDA checkpoint, which was not tried with weights in host "
            "memory that is registered with the driver; run this engine without headrace to checkpoint it"
        )
        super().checkpoint_prepare()

    def _refuse_while_offloaded(self, message: str) -> None:
        if self._offloader is not None:
            raise StateError(message)


class _HitLog:
    """Logs and counts how many experts were found on the GPU, at most every ten seconds, while the model runs."""

    def __init__(self, reader: CountsReader) -> None:
        self._reader = reader
        # No registry: a server reads the counts of its workers from files (PROMETHEUS_MULTIPROC_DIR).
        about = "Experts in use, by where a step found them"
        self._uses = Counter("headrace_expert_uses", about, ["found"], registry=None)
        self._next = time.monotonic() + _LOG_EVERY_S
        self._is_asked = False
        self._logged = (0, 0, 0)

    def poll(self) -> None:
        """Call it after each step; the host never waits for the GPU."""
        if not self._is_asked:
            if time.monotonic() >= self._next:
                self._reader.begin()
                self._is_asked = True
            return
        if (counts := self._reader.result()) is None:
            return
        now = (counts.hits, counts.fetched, counts.in_place)
        hits, fetched, in_place = (after - before for after, before in zip(now, self._logged, strict=True))
        if used := hits + fetched + in_place:
            logger.info(
                f"headrace: {hits / used:.1%} of {used} experts in use were on the GPU, {fetched} were fetched and "
                f"{in_place} read in place"
            )
            for found, count in (("device", hits), ("fetched", fetched), ("in_place", in_place)):
                self._uses.labels(found).inc(count)
        self._logged, self._is_asked, self._next = now, False, time.monotonic() + _LOG_EVERY_S


class _StoredWeights:
    """The parameters of ``model`` by name, with the bytes of the store, for code that calls ``named_parameters``."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        # One module at a time: state_dict() copies offloaded weights, and all of them may not fit the host again.
        last, state = None, {}
        for name, _ in self._model.named_parameters():
            module, _, attr = name.rpartition(".")
            if module != last:
                last, state = module, self._model.get_submodule(module).state_dict(keep_vars=True)
            yield name, state[attr]


def _break_capture(action: Callable[[], None]) -> bool:
    """Run ``action`` between two segments of a breakable CUDA graph, as attention is; False if none is captured."""
    module = sys.modules.get("vllm.compilation.breakable_cudagraph")  # older versions have none
    capture = None if module is None else module.BreakableCUDAGraphCapture.current()
    if capture is None or not capture._capturing:  # between two segments
        return False
    capture.add_eager(action)
    return True


def _keep_units_out_of_pieces(compilation: Any) -> bool:
    """Make vLLM split the compiled model at headrace's ops, as it does at attention; returns whether it can."""
    # Each piece between two splits may be a CUDA graph. If a unit began and ended inside one, its copy would have to
    # join before that graph ends, and could not overlap compute.
    if compilation.use_inductor_graph_partition:
        return False
    if compilation.splitting_ops:  # empty: the model is one piece
        ops = [*compilation.splitting_ops, "headrace::wait", "headrace::release"]
        compilation.splitting_ops = list(dict.fromkeys(ops))  # another worker of this process may have added them
    return True


class Worker(OffloadingWorker, gpu_worker.Worker):  # type: ignore[misc,unused-ignore]
    """vLLM's GPU worker, whose ``get_offloader()`` returns headrace's offloader."""


def _expert_kernels() -> ExpertKernels | None:
    """The kernels of experts that read a cache, if this vLLM has them."""
    if (version_number(vllm.__version__) or NEWEST) < OLDEST_WITH_CACHE:
        return None
    from headrace.adapters.vllm.experts import KernelExperts

    return KernelExperts


def _refuse_second_engine() -> None:
    if _in_force is not None and _in_force() is not None:
        raise StateError(
            "an engine of this process has headrace's offloader already, and its weights are offloaded: shut it down "
            "first, or start this one in a separate process"
        )


def _refuse_other_offloader(offloader: Any) -> None:
    """Refuse an offloader that is in use; vLLM's own, which its runner has set for the same flags, is replaced."""
    if not type(offloader).__module__.startswith("vllm."):
        raise StateError(
            f"{type(offloader).__module__}.{type(offloader).__name__} is vLLM's offloader already, and headrace would "
            f"replace it: use one of the two"
        )
    if getattr(offloader, "module_offloaders", None) or getattr(offloader, "cpu_offload_bytes", 0):
        raise StateError(
            f"vLLM's own {type(offloader).__name__} has offloaded layers in this process already: load the model with "
            f"one of the two, headrace or vLLM's"
        )


def _require_same_units(modules: list[str]) -> None:
    """Refuse units that differ among tensor-parallel ranks; ``modules``: those of this rank. Collective.

    vLLM's compiler fuses a collective with the op after it, unless a unit's boundary is between them. So with different
    boundaries ranks would call different collectives, and wait for each other for ever.
    """
    group = get_tp_group()
    for rank, theirs in enumerate(gathered(modules, group)):
        if theirs != modules:
            differ = sorted(set(theirs) ^ set(modules)) or modules
            raise OptionError(
                f"tensor-parallel ranks would offload different modules: rank {group.rank_in_group} {len(modules)} and "
                f"rank {rank} {len(theirs)}, such as {differ[0]}, because their shards differ in size: select weights "
                f"by name (--offload-group-size, headrace.params), or give every rank shards of one size"
            )


def _replica_group(replicas: int | None, parallel: Any, rank: int) -> ProcessGroup:
    """The workers of this host with the same weights as this one, which share one copy in mode ``shm_cpu``.

    Args:
        replicas: engines of a dense model that one command starts on this host; unused where vLLM has the group.
        parallel: vLLM's ``ParallelConfig``.
        rank: rank of this worker in its engine; tensor-parallel ranks hold different weights.

    Raises:
        OptionError: there are none, or their number was not given.
        PeerError: another engine did not connect in time.
    """
    group = get_dp_group()
    # Data-parallel ranks of a mixture of experts are ranks of one world, and vLLM has a group of them. Those of a dense
    # model are separate engines with a world size of 1, which do not know their number.
    if group.world_size > 1:
        return group.cpu_group  # type: ignore[no-any-return]
    index = parallel.data_parallel_rank_local
    if replicas is None or index is None:
        raise OptionError(
            "headrace.mode 'shm_cpu' keeps one copy for data-parallel ranks, and this engine is the only one that it "
            "knows of: start vLLM with --data-parallel-size N. For a dense model, whose ranks vLLM runs as separate "
            'engines, also give their number on this host ("replicas": N). Or leave the mode out'
        )
    if index >= replicas:
        raise OptionError(
            f"headrace.replicas = {replicas}, and this is engine {index} of this host, counted from 0: set it to the "
            f"number that --data-parallel-size starts here"
        )
    # vLLM sets this port aside for the ranks of a launch, and engines of a dense model leave it unused.
    store = _replica_store(parallel.data_parallel_master_port, index == rank == 0, replicas)
    return ProcessGroup(PrefixStore(f"headrace/replicas/{rank}", store), index, replicas)


def _replica_store(port: int, is_master: bool, replicas: int) -> Store:
    """The key-value store of all workers of the launch, in the process of one of them."""
    patience = timedelta(seconds=peer_timeout_s())
    try:
        # The timeout of TCPStore does not apply while another program holds the port and never answers.
        return call_within(
            patience.total_seconds() + GRACE_S,
            lambda: TCPStore("127.0.0.1", port, is_master=is_master, timeout=patience, wait_for_workers=False),
        )
    except RuntimeError as error:  # the base class of DistNetworkError and DistStoreError
        reason = str(error).splitlines()[0]
        if is_master:
            raise PeerError(
                f"the first of {replicas} engines that share one copy (headrace.replicas) cannot open port {port}, "
                f"where they connect ({reason}): start vLLM again, which looks for a free one each time"
            ) from error
        raise PeerError(
            f"the {replicas} engines that share one copy (headrace.replicas) did not all connect to port {port} "
            f"within {patience.total_seconds():.0f} s ({reason}): one `vllm serve --data-parallel-size` has to start "
            f"all of them. Look at the errors of the first; if it is only slow, raise HEADRACE_PEER_TIMEOUT"
        ) from error
