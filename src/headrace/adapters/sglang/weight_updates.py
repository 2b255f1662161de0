"""SGLang's calls that write weights of a running server, beside an offload.

``update_weights_from_disk`` is one call. ``update_weights_from_tensor`` and ``_from_distributed`` come in pieces,
between the two ends of a session; until its end the server answers with the old weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang.srt.managers import io_struct
from sglang.srt.runtime_context import get_parallel

from headrace.adapters.engine_interface import all_or_none, gathered, require_no_failure
from headrace.errors import OptionError, StateError
from headrace.offloaders.layerwise import EngineOffloader
from headrace.offloaders.new_weights import NewWeights

logger = logging.getLogger("sglang.headrace")

_SESSION = "headrace_session"  # at a runner


@dataclass
class _Session:
    """An update in pieces.

    Attributes:
        failure: of the first piece that had one.
        flushes: a piece asks for a flush of the cache, which forwards may have filled until the end.
    """

    new: NewWeights
    failure: str = ""
    flushes: bool = False


def offloader_of(runner: Any) -> EngineOffloader | None:
    """The offloader of the model of ``runner``, if it is offloaded."""
    return getattr(runner, "headrace_offloader", None)


def _session_of(runner: Any) -> _Session | None:
    return getattr(runner, _SESSION, None)


def _gathered(value: Any) -> list[Any]:
    """``value`` of every tensor-parallel rank."""
    return gathered(value, get_parallel().tp_group)


def _require_one_stage(call: str) -> None:
    if get_parallel().pp_size > 1:
        raise OptionError(
            f"{call}: stages of a pipeline get new weights one by one, and one may fail; nothing was changed"
        )


def update_from_disk(original: Callable[..., Any], updater: Any, *args: Any, **kwargs: Any) -> tuple[bool, str]:
    """SGLang's, which says whether it succeeded, and why not."""
    offloader, call = offloader_of(updater.get_model_runner()), "update_weights_from_disk"
    if offloader is None:
        return original(updater, *args, **kwargs)  # type: ignore[no-any-return]
    # Graphs stay valid, and would be captured over the copies that are written.
    kwargs["recapture_cuda_graph"] = False
    path = updater.model_config.model_path
    try:
        _require_one_stage(call)
        with all_or_none(offloader, call, _gathered):
            success, message = original(updater, *args, **kwargs)
            if not success:
                raise StateError(message)
    except Exception as error:
        updater.model_config.model_path = path
        return False, f"{error} (headrace: the weights are the ones from before)"
    return True, message


def begin_update(original: Callable[..., Any], manager: Any, recv_req: Any) -> Any:
    """SGLang's; all weights are copied to host memory, where the session writes."""
    runner, call = manager.tp_worker.model_runner, "begin_weight_update"
    offloader = offloader_of(runner)
    if offloader is None or _session_of(runner) is not None:
        return original(manager, recv_req)
    failure, new = "", None
    try:
        _require_one_stage(call)
        new = offloader.new_weights(call)
    except Exception as error:
        failure = str(error)
    try:
        require_no_failure(call, _gathered(failure))
        assert new is not None
        with new.written():
            answer = original(manager, recv_req)
    except StateError as error:
        return _failed("BeginWeightUpdateReqOutput", str(error))
    setattr(runner, _SESSION, _Session(new))
    return answer


def note_flush(original: Callable[..., Any], manager: Any, recv_req: Any) -> Any:
    """SGLang's, for a piece of a session."""
    if (session := _session_of(manager.tp_worker.model_runner)) is not None:
        session.flushes |= recv_req.flush_cache
    return original(manager, recv_req)


def write_in_session(original: Callable[..., Any], updater: Any, *args: Any, **kwargs: Any) -> tuple[bool, str]:
    """SGLang's; of a session that has failed nothing is taken over."""
    session = _session_of(updater.get_model_runner())
    if session is None:
        return original(updater, *args, **kwargs)  # type: ignore[no-any-return]
    try:
        with session.new.written():
            success, message = original(updater, *args, **kwargs)
    except Exception as error:
        success, message = False, f"{type(error).__name__}: {error}"
    if not success:
        session.failure = session.failure or message
    return success, message


def end_update(original: Callable[..., Any], manager: Any, recv_req: Any) -> Any:
    """SGLang's; the new weights are taken over, or none of them."""
    runner, call = manager.tp_worker.model_runner, "end_weight_update"
    session = _session_of(runner)
    if session is None:
        return original(manager, recv_req)
    setattr(runner, _SESSION, None)
    try:
        with session.new.written():
            answer = original(manager, recv_req)
    except Exception as error:
        manager._session, session.failure = None, session.failure or str(error)
    try:
        require_no_failure(call, _gathered(session.failure))
        session.new.take_over()
    except Exception as error:
        return _failed("EndWeightUpdateReqOutput", str(error))
    if session.flushes and not manager.flush_cache():
        message = (
            "weights were updated, but the cache was not flushed, because requests run: end them, then /flush_cache"
        )
        return _failed("EndWeightUpdateReqOutput", message)
    return answer


def _failed(output: str, message: str) -> Any:
    logger.error(message)
    return getattr(io_struct, output)(success=False, message=message)


def refuse_ipc(original: Callable[..., Any], manager: Any, recv_req: Any) -> Any:
    """SGLang's, which answers with the reason."""
    if offloader_of(manager.tp_worker.model_runner) is None:
        return original(manager, recv_req)
    message = (
        "update_weights_from_ipc (checkpoint-engine) is refused: it was not tried while headrace offloads this model. "
        "Use update_weights_from_disk, or update_weights_from_tensor in a session"
    )
    return _failed("UpdateWeightsFromIPCReqOutput", message)
