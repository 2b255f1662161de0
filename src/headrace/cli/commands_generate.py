"""``headrace generate``: text from a checkpoint that does not fit. The text goes to stdout, all else to stderr."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.arguments import (
    disk_options,
    folder_of,
    requested,
    require_writable,
    target_device,
    with_offload_flags,
)
from headrace.cli.terminal import byte_bar, stderr
from headrace.config import SHARDED_MODES, Mode
from headrace.errors import CheckpointError, OptionError
from headrace.figures import format_rate, format_size, format_time
from headrace.flags import OffloadFlags
from headrace.memory.system import PeakMeter, peak_rss_bytes

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from headrace.api import Handle

__all__ = ["generate"]


@with_offload_flags()
def generate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder of a causal language model.")],
    *,
    prompt: Annotated[str, typer.Option("--prompt", metavar="TEXT", help="The text to continue; - reads stdin.")],
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", metavar="N", min=1, help="Stop after N.")] = 64,
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature", metavar="T", min=0.0, help="Sample at this temperature; without it, or 0: greedy."
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", metavar="N", help="Seed of the sampling (default 0).")] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace", metavar="FILE", help="Write copies, compute and stalls for Perfetto; of a GPU, launches alone."
        ),
    ] = None,
    flags: OffloadFlags,
) -> None:
    """Generate text from a checkpoint that does not fit the device. The text goes to stdout, all else to stderr."""
    folder = folder_of(model)
    device = target_device(flags.device)
    policy = requested(flags, device)
    if getattr(policy, "mode", None) == "meta":
        raise OptionError(
            "mode meta (of --offload-mode, or of the plan in --plan) keeps none of the bytes that are offloaded: it is "
            "for sizing with `headrace plan`, and its text would be meaningless; use --offload-mode disk or cpu"
        )
    if seed is not None and not temperature:
        raise OptionError("--seed has no effect on greedy decoding; add --temperature 0.7, say")
    if trace is not None:  # before the text is generated, at whose end it is written
        require_writable("--trace", trace)
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text:
        raise OptionError("--prompt is empty; a causal language model needs at least one token to continue")
    from headrace.adapters.transformers.opened_model import open_model

    opened = open_model(folder)
    module: Any = opened.module
    if not module.can_generate() or module.config.is_encoder_decoder:
        raise OptionError(
            f'headrace generate needs a causal language model (architectures ["...ForCausalLM"] in config.json), found '
            f"{type(module).__name__}"
        )
    from headrace.adapters.transformers.load_folder import load_matched
    from headrace.plan.report import render
    from headrace.planning import plan_model
    from headrace.runtime.prepare import open_ranks

    # Planned here and not by load(): the plan's mode decides about the group, and it is printed before the loading.
    plan = plan_model(opened, policy, device=device, disk=disk_options(flags)).plan
    group = _process_group(plan.mode, device)
    tokenizer, inputs = _tokenize(opened.folder, text)
    stderr.print(render(plan, opened.name))
    meter = PeakMeter()
    with byte_bar("loading", stderr) as progress, open_ranks(group) as ranks:
        handle = load_matched(opened.folder, module, opened.match, plan, device, disk_options(flags), progress, ranks)
    # The handle is not removed at the end: that would bring all weights back, which may not fit.
    inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
    tokens, seconds = _stream(module, tokenizer, inputs, max_new_tokens, temperature, seed or 0)
    _print_figures(handle, tokens, seconds, meter.growth_bytes())
    if trace is not None:
        handle.trace(trace)
        stderr.print(f"trace: {trace} (open it at https://ui.perfetto.dev)", highlight=False)


def _process_group(mode: Mode, device: torch.device) -> ProcessGroup | None:
    """The processes that torchrun started, where ``mode`` shares a host's memory, else ``None``; sets each one's GPU.

    Raises:
        OptionError: this process was started alone, or ``mode`` needs more than a launcher gives.
    """
    if mode in SHARDED_MODES:  # of a plan that a program saved
        raise OptionError(
            f"the plan's mode is {mode}, which needs a group of GPUs that a program passes to headrace.offload: carry "
            f"it out there, or make a plan for the command line with --offload-mode shm_cpu or cpu"
        )
    if mode != "shm_cpu":
        return None
    import torch.distributed as dist

    if not dist.is_torchelastic_launched():
        raise OptionError(
            f"--offload-mode {mode} shares one copy of the weights between processes, and this one was started alone: "
            f"start several with `torchrun --nproc-per-node N -m headrace ...`, or use --offload-mode cpu"
        )
    if not dist.is_initialized():
        dist.init_process_group("gloo")  # only its key-value store is used: no memory of a GPU
    if device.type == "cuda" and device.index is None:
        import torch

        torch.cuda.set_device(dist.get_node_local_rank())  # or all processes of a host would use GPU 0
    return dist.group.WORLD


def _tokenize(folder: Path, text: str) -> tuple[Any, dict[str, Any]]:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder}: expected a tokenizer that transformers can read (tokenizer.json), found none: {error}"
        ) from error
    inputs = dict(tokenizer(text, return_tensors="pt", return_token_type_ids=False))
    if not inputs["input_ids"].numel():  # transformers makes an empty tokenizer if its files are missing
        raise OptionError(
            f"--prompt {text!r} has no tokens in the vocabulary of {len(tokenizer)}; is tokenizer.json missing from "
            f"{folder}?"
        )
    return tokenizer, inputs


def _stream(
    module: Any, tokenizer: Any, inputs: dict[str, Any], max_new_tokens: int, temperature: float | None, seed: int
) -> tuple[int, float]:
    """Print the text as it comes; returns the number of new tokens and the seconds they took, prompt included."""
    import torch
    from transformers import TextStreamer

    # None avoids warnings about sampling parameters in the model's generation config.
    sampling = {"temperature": temperature} if temperature else {"temperature": None, "top_k": None, "top_p": None}
    torch.manual_seed(seed)
    # One sequence is never padded, but transformers warns without an id, and where the tokenizer makes no mask it masks
    # the tokens of the prompt that are the id.
    eos = module.generation_config.eos_token_id
    pad_ids = [tokenizer.pad_token_id, *(eos if isinstance(eos, list) else [eos]), 0]
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    begin = time.perf_counter()
    output = module.generate(
        **inputs,
        max_new_tokens=max_new_tokens,
        streamer=streamer,
        do_sample=bool(temperature),
        pad_token_id=next(token for token in pad_ids if token is not None),
        **sampling,
    )
    return output.shape[1] - inputs["input_ids"].shape[1], time.perf_counter() - begin


def _print_figures(handle: Handle, tokens: int, seconds: float, growth_bytes: int) -> None:
    stats = handle.stats()
    figures = (
        f"{tokens} tokens in {format_time(seconds)} ({format_rate(tokens / seconds)} tokens/s)",
        f"{format_size(stats.bytes_moved)} moved ({stats.bytes_moved / seconds / 1e9:.2f} GB/s)",
        f"{stats.stalls} stalls ({format_time(stats.stall_s)})",
        f"peak memory {format_size(peak_rss_bytes())}, {format_size(growth_bytes)} of it since loading began",
        f"{format_size(handle.plan.device_bytes)} planned for weights",
    )
    stderr.print("; ".join(figures), style="bold", highlight=False, soft_wrap=True)
