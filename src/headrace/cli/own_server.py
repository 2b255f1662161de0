"""The engine of ``headrace serve`` without ``--engine``: everything is refused, loaded and bound before it listens."""

from __future__ import annotations

import json
import logging
import shlex
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from headrace.checkpoint.model_folder import is_quantised, model_folder
from headrace.cli.arguments import disk_options, requested, target_device
from headrace.cli.commands_generate import open_tokenizer
from headrace.cli.terminal import byte_bar, stderr
from headrace.config import Workload
from headrace.errors import OptionError
from headrace.flags import OffloadFlags, Surface, counts
from headrace.formatting import format_size

if TYPE_CHECKING:
    from headrace.adapters.transformers.opened_model import OpenedModel
    from headrace.planning import PlanResult
    from headrace.serving.admission import Pool

__all__ = ["ServerOptions", "run_server"]

_SURFACE = Surface(modes=("cpu", "disk"), inside=" of headrace serve", needs={"batch": (), "context": ()})
_SEQUENCES = 8
_CONTEXT = 2048


@dataclass(frozen=True)
class ServerOptions:
    """The flags of the server itself; ``is_plain``: the model's own sampling is not the default."""

    host: str
    port: int
    api_key: str | None
    names: list[str]
    max_queue: int
    cors: bool
    is_plain: bool
    dtype: str | None
    dry_run: bool


def run_server(model: str, flags: OffloadFlags, options: ServerOptions) -> None:
    """Load ``model`` as the flags say, and serve it until a signal comes.

    Raises:
        OptionError, CheckpointError: anything that cannot be served, before it is loaded.
    """
    folder = model_folder(model)
    device = target_device(flags.device)
    sequences = max(counts("--batch", flags.batch)) if flags.batch is not None else _SEQUENCES
    if flags.device_memory is not None and flags.batch is None:
        flags = replace(flags, batch=f"1,{sequences}")
    policy = requested(flags, device, _SURFACE)
    from headrace.adapters.transformers.load_folder import load_matched
    from headrace.adapters.transformers.opened_model import open_model
    from headrace.plan.report import render
    from headrace.planning import plan_model
    from headrace.runtime.planner_factory import PlanRequest
    from headrace.serving.admission import Pool
    from headrace.serving.app import bind, make_app, run_app
    from headrace.serving.batches import BLOCK_TOKENS, Batches

    if is_quantised(folder):
        raise OptionError(
            f"{folder}: expected plain weights, found quantised ones (quantization_config in config.json), which this "
            f"server was not tried with; use headrace serve --engine vllm, or the model's unquantised checkpoint"
        )
    opened = open_model(folder, options.dtype, device=device)
    tokenizer = open_tokenizer(folder)
    settings = _settings(opened, options.is_plain)
    request = PlanRequest(opened, policy, device=device, disk=disk_options(flags))
    planned = plan_model(request)
    longest = _longest(flags, planned)
    pool = Pool.of(sequences, longest, BLOCK_TOKENS)
    request = replace(request, policy=planned.plan, workload=Workload([sequences], longest))
    planned = plan_model(request)  # with a cache measured
    if planned.misfit:
        raise OptionError(f"the plan {planned.misfit}; use a smaller --batch or --context, or less --device-memory")
    stderr.print(render(planned.plan, opened.name))
    stderr.print(_cache_line(planned, pool, sequences), highlight=False, soft_wrap=True)
    if options.dry_run:
        return
    if device.type == "cuda" and find_spec("vllm") is not None:
        stderr.print("vLLM is installed, and faster on a GPU: headrace serve --engine vllm", soft_wrap=True)
    bound = bind(options.host, options.port)
    with byte_bar("loading", stderr) as progress:
        request = replace(request, model=opened.module, policy=planned.plan)
        handle = load_matched(folder, request, opened.match, progress)
    module: Any = opened.module
    if options.is_plain:
        module.generation_config = settings
    for name in ("transformers", "ContinuousBatchingLogger"):  # they warn in every request and batch
        logging.getLogger(name).setLevel(logging.ERROR)
    batches = Batches(module, pool, options.max_queue)
    app = make_app(module, handle, tokenizer, options.names, batches, options.api_key, options.cors)
    run_app(app, bound, lambda: _print_address(bound.getsockname(), options))


def _settings(opened: OpenedModel, plain: bool) -> Any:
    """The generation config that requests start from; ``plain``: with the tokens of the model's own, and greedy.

    Raises:
        OptionError: the model generates no text, or in a way that batches cannot.
    """
    from transformers import GenerationConfig

    from headrace.serving.batches import batch_settings, pool_blocks

    module: Any = opened.module
    if not module.can_generate() or module.config.is_encoder_decoder:
        raise OptionError(
            f'headrace serve needs a causal language model (architectures ["...ForCausalLM"] in config.json), found '
            f"{type(module).__name__}"
        )
    pool_blocks(module.config.get_text_config(), 1)
    settings: Any = module.generation_config
    with suppress(OSError):  # of a folder without generation_config.json
        settings = GenerationConfig.from_pretrained(opened.folder, local_files_only=True)
    if plain:
        make: Any = GenerationConfig
        settings = make(
            bos_token_id=settings.bos_token_id, eos_token_id=settings.eos_token_id, pad_token_id=settings.pad_token_id
        )
    try:
        batch_settings(module, settings)
    except OptionError as error:
        raise OptionError(
            f"{opened.folder}/generation_config.json: {error}; leave its sampling out with --generation-config none, "
            f"or use --engine vllm"
        ) from None
    return settings


def _longest(flags: OffloadFlags, planned: PlanResult) -> int:
    """Tokens of the longest sequence: as the flags or the plan say, else what most requests need."""
    limit = planned.planner.profile.max_context
    asked = int(flags.context) if flags.context is not None else planned.plan.context
    if asked and limit and asked > limit:
        raise OptionError(
            f"--context {asked}: expected at most {limit}, the tokens that the model was made for "
            f"(max_position_embeddings in its configuration)"
        )
    return asked or min(_CONTEXT, limit or _CONTEXT)


def _cache_line(planned: PlanResult, pool: Pool, sequences: int) -> str:
    num_bytes = planned.planner.profile.cache_bytes(sequences, pool.longest)
    counted = "counted in --device-memory" if planned.plan.context else "beside the weights"
    return (
        f"cache: {pool.num_tokens} tokens, i.e. {sequences} sequences of {pool.longest} or more shorter ones; "
        f"{format_size(num_bytes)} {counted}"
    )


def _print_address(address: Any, options: ServerOptions) -> None:
    host, port = address[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    body = json.dumps({"model": options.names[0], "prompt": "Water", "max_tokens": 16})
    key = "" if options.api_key is None else " -H 'Authorization: Bearer KEY'"
    lines = [f"serving {options.names[0]} at {url}/v1, Ctrl-C ends it; in another terminal:"]
    lines += [f"  curl {url}/v1/completions{key} -H 'Content-Type: application/json' -d {shlex.quote(body)}"]
    if options.api_key is None and not host.startswith("127.") and host != "::1":
        lines.append(f"whoever reaches {host} may use it; --api-key or HEADRACE_API_KEY asks for a key")
    for line in lines:
        stderr.print(line, highlight=False, markup=False, soft_wrap=True)
