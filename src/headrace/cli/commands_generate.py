"""``headrace generate``: text from a checkpoint that does not fit. The text goes to stdout, all else to stderr."""

from __future__ import annotations

import io
import json
import logging
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console

from headrace.cli.arguments import (
    CPU_EXPERTS_HELP,
    DTYPE_HELP,
    EXPERTS_HELP,
    LIGER_HELP,
    SpeculationFlags,
    asked_of_cpu,
    check_cpu_experts,
    check_dtype,
    disk_options,
    folder_or_download,
    refuse_idle,
    requested,
    require_writable,
    target_device,
    with_flags,
)
from headrace.cli.prompt import is_instruct, messages_of, open_with_template, tokenize
from headrace.cli.terminal import byte_bar, print_error, print_line, stderr
from headrace.config import AUTO_CONTEXT, RANK_MODES, SHARDED_MODES, count
from headrace.errors import OptionError
from headrace.flags import OffloadFlags, row
from headrace.formatting import TokenText, format_rate, format_size, format_time, pluralize
from headrace.json_files import encode, write_file
from headrace.memory.system import PeakMeter, peak_rss_bytes
from headrace.stats import timed

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from headrace.adapters.transformers.opened_model import OpenedModel
    from headrace.api import Handle
    from headrace.experts.recorder import RoutingRecorder
    from headrace.plan.plan import Plan
    from headrace.plan_model import PlanResult

_log = logging.getLogger(__name__)
_GREETING = "Hello"  # stands for the first message of a chat until there is one


def _temperature(flag: str, value: float) -> None:
    if not (value == 0 or value >= 1e-30):  # NaN is neither, and logits divided by less leave the range of float32
        raise OptionError(f"{flag} {value:g}: expected 0 (greedy), or a temperature above, such as {flag} 0.7")


def _probability(flag: str, value: float) -> None:
    if not 0 < value <= 1:
        raise OptionError(f"{flag} {value:g}: expected a probability above 0, at most 1, such as {flag} 0.9")


def _seed(flag: str, value: int) -> None:
    if not -(2**63) <= value < 2**64:
        raise OptionError(f"{flag} {value}: expected a number of at most 64 bits, such as {flag} 1")


def _utf8(source: str, text: str) -> None:
    """Refuse bytes that are no UTF-8, which Python reads as halves of surrogate pairs."""
    if text.encode(errors="ignore").decode() != text:
        raise OptionError(f"{source}: expected text in UTF-8, found other bytes in {text[:60]!a}; convert it")


def _open_stdin(what: str) -> None:
    if sys.stdin is None:
        raise OptionError(f"{what} is read from stdin, which is closed; start headrace without <&-")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # for _utf8(), whatever the locale


@dataclass(frozen=True)
class GenerateOptions(SpeculationFlags):
    """The flags of this verb alone."""

    system: str | None = row("TEXT", "A system message before the prompt, in the chat template.", _utf8)
    max_new_tokens: int = row("N", "Stop after N tokens (default 64).", count, off=64)
    temperature: float | None = row("T", "Sample at this temperature (default 0: greedy decoding).", _temperature)
    top_p: float | None = row(
        "P", "Sample from the likeliest tokens of probability P (default the model's).", _probability
    )
    top_k: int | None = row("K", "Sample from the K likeliest tokens (default the model's).", count)
    seed: int | None = row("N", "Random seed for sampling (default 0).", _seed)
    prefill_chunk_size: int | None = row("N", "Read a prompt N tokens at a time: less memory, other roundings.", count)
    dtype: str | None = row("NAME", DTYPE_HELP, check_dtype)
    attn_implementation: str | None = row("NAME", "Attention of transformers: sdpa, eager, ... (default the model's).")
    experts_implementation: str | None = row("NAME", f"{EXPERTS_HELP}.")
    cpu_experts: str | None = row("on|auto", f"{CPU_EXPERTS_HELP}.", check_cpu_experts)
    use_liger_kernel: bool = row("", f"{LIGER_HELP}.", off=False)
    no_graphs: bool = row("", "Launch each kernel from Python instead of replaying CUDA graphs.", off=False)
    download: bool = row("", "Download a model that is not there, without a question.", off=False)
    quiet: bool = row("", "Print nothing but the text and errors.", off=False)
    trace: Path | None = row("FILE", "Write copies, compute and stalls for Perfetto (GPU: launches).", require_writable)
    expert_trace: Path | None = row("FILE", "Record the experts that tokens choose, for `plan`.", require_writable)
    acceptance: Path | None = row(
        "FILE", "Record the tokens a pass of --speculate, for --accepted-from.", require_writable
    )

    def sampling(self) -> dict[str, Any]:
        """The sampling arguments of transformers' ``generate``."""
        if not self.temperature:
            given = {"--top-p": self.top_p, "--top-k": self.top_k, "--seed": self.seed}
            refuse_idle(given, "on greedy decoding; add --temperature 0.7, for example")
            # None avoids warnings about sampling parameters in the model's generation config.
            return {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
        sampling = {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        return {name: value for name, value in sampling.items() if value is not None}


@dataclass(frozen=True)
class ChatOptions(GenerateOptions):
    """The flags of ``headrace chat``."""

    max_new_tokens: int = row("N", "Stop an answer after N tokens (default 1024).", count, off=1024)


@with_flags(GenerateOptions)
def generate(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Folder of a causal language model, or a name in the Hub's cache.")
    ],
    *,
    prompt: Annotated[str, typer.Option("--prompt", metavar="TEXT", help="The text to continue; - reads stdin.")],
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            metavar="",
            help="Use the prompt as a message in the model's chat template (default for instruct models).",
        ),
    ] = None,
    options: GenerateOptions,
    flags: OffloadFlags,
) -> None:
    """Generate text with a model that does not fit on the device. Text goes to stdout, everything else to stderr."""
    source, text = "--prompt", prompt
    if prompt == "-":
        _open_stdin("the prompt")
        source, text = "stdin", sys.stdin.read()
    _utf8(source, text)
    if not text:
        raise OptionError("--prompt is empty; a causal language model needs at least one token to continue")
    _run(model, text, chat, options, flags)


@with_flags(ChatOptions)
def chat(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Folder of a chat model, or a name in the Hub's cache.")
    ],
    *,
    options: ChatOptions,
    flags: OffloadFlags,
) -> None:
    """Chat with a model that does not fit on the device, a message a line; /help lists commands, -v prints the plan."""
    _open_stdin("a chat")
    _run(model, None, True, options, flags)


def _run(model: str, text: str | None, chat: bool | None, options: GenerateOptions, flags: OffloadFlags) -> None:
    """Load ``model`` as the flags ask for, and continue ``text``, or chat if it is ``None``."""
    sampling, speculation = options.sampling(), options.speculation()
    if speculation is None:
        refuse_idle({"--acceptance": options.acceptance}, "without --speculate")
    else:
        refuse_idle({"--prefill-chunk-size": options.prefill_chunk_size}, "beside --speculate; leave one of them out")
    if options.system is not None and chat is False:
        raise OptionError("--system and --no-chat contradict each other: a system message needs the chat template")
    notes = Console(stderr=True, quiet=True) if options.quiet else stderr
    folder = folder_or_download(model, notes, fetch=options.download)
    device = target_device(flags.device)
    policy = requested(flags, device)
    mode = getattr(policy, "mode", None)
    if mode == "meta":
        raise OptionError(
            "mode meta (of --offload-mode, or of the plan in --plan) stores no offloaded weights: it is for "
            "sizing with `headrace plan`, and its text would be meaningless; use --offload-mode disk or cpu"
        )
    if options.no_graphs and device.type != "cuda":
        raise OptionError(f"--no-graphs has no effect on {device}, which has no CUDA graphs; leave it out")
    if text is None and mode in RANK_MODES:
        raise OptionError(f"mode {mode} is for several processes, and a chat has one: use --offload-mode cpu or disk")
    import torch
    from transformers.utils.logging import disable_progress_bar

    from headrace.adapters.transformers.load_folder import load_matched
    from headrace.adapters.transformers.opened_model import open_model
    from headrace.experts.recorder import RoutingRecorder
    from headrace.plan_model import plan_model
    from headrace.planning.request import PlanRequest
    from headrace.runtime.prepare import open_ranks

    if options.quiet:
        logging.getLogger("transformers").setLevel(logging.ERROR)
        warnings.simplefilter("ignore")
    disable_progress_bar()  # type: ignore[no-untyped-call] # of drafts and heads
    group = _process_group(mode, device)
    how: Any = {"experts_implementation": options.experts_implementation, "use_liger_kernel": options.use_liger_kernel}
    opened = open_model(folder, options.dtype, options.attn_implementation, device, **how)
    module: Any = opened.module
    opened.require_causal("headrace chat" if text is None else "headrace generate")
    tokenizer, inputs, chat = _read_prompt(opened, text or _GREETING, options.system, chat, notes, sampling)
    length = inputs["input_ids"].shape[1] + options.max_new_tokens
    if policy is None and group is None and device.type == "cuda":
        policy = opened.default_budget(1, max(length, AUTO_CONTEXT))
    # Planned here and not by load(), so that the plan is printed before the loading.
    num_ranks = group.size() if group is not None and mode in SHARDED_MODES else 1
    request = PlanRequest(opened, policy, device=device, disk=disk_options(flags), num_ranks=num_ranks)
    with open_ranks(group) as ranks:
        planned = plan_model(replace(request, speculation=speculation, ranks=ranks))
    if speculation is not None and (forecast := planned.speculation) is not None:
        forecast.require_faster()
        speculation = replace(speculation, guesses=forecast.guesses)
    max_new_tokens, longest = options.max_new_tokens, planned.planner.profile.max_context
    _check_length(inputs["input_ids"].shape[1], max_new_tokens, longest, planned.plan)
    plan = planned.plan
    # A recorder of routing runs Python in every step.
    graphs = not options.no_graphs and options.expert_trace is None
    # The speed of eager Python code is not predicted.
    is_predicted = device.type != "cuda" or (graphs and group is None)
    is_whole = text is not None or logging.getLogger("headrace").isEnabledFor(logging.INFO)  # -v
    _print_plan(notes, planned, is_whole, is_predicted)
    if text is None:
        print_line(notes, "/help lists commands; Ctrl-C ends an answer, Ctrl-D or /exit the chat")
    share, meter = asked_of_cpu(options.cpu_experts, planned, notes), PeakMeter()
    with byte_bar("loading", notes) as progress, open_ranks(group) as ranks, timed(_log, "weights"):
        request = replace(request, model=module, policy=plan, ranks=ranks, speculation=speculation)
        handle = load_matched(folder, request, opened.match, progress, graphs, share)
    # The handle is not removed at the end: that would make all weights resident, which may not fit.
    recorder = None if options.expert_trace is None else RoutingRecorder(module, device)

    def answer(inputs: dict[str, Any], stopped: Sequence[int] | None = None) -> _Answer:
        _check_length(inputs["input_ids"].shape[1], max_new_tokens, longest, plan)
        moved = {name: tensor.to(device) for name, tensor in inputs.items()}
        try:
            return _stream(module, tokenizer, moved, options, _Printer(tokenizer, continues=not chat), stopped)
        except torch.OutOfMemoryError as error:
            reason = ". ".join(str(error).split(". ")[:2])
        length = inputs["input_ids"].shape[1]
        chunk = max(1, min(512, (options.prefill_chunk_size or length) // 2))
        raise OptionError(  # outside of the except block, whose traceback keeps the tensors of the prompt alive
            f"a prompt of {pluralize(length, 'token')} and its answer do not fit beside "
            f"{format_size(plan.device_bytes)} of weights: {reason}; leave more memory (a smaller --device-memory), or "
            f"read the prompt in parts (--prefill-chunk-size {chunk})"
        )

    if text is None:
        answers = _Conversation(tokenizer, folder, options.system, answer, notes).run()
    else:
        answers = [answer(inputs)]
    if group is not None and device.type == "cuda":
        torch.cuda.synchronize()  # no rank ends before its copies for others have completed
    if answers:
        _print_metrics(notes, handle, answers, device, meter.growth_bytes())
    _keep_records(options, handle, recorder, notes)


def _keep_records(options: GenerateOptions, handle: Handle, recorder: RoutingRecorder | None, notes: Console) -> None:
    """Write the files that the flags ask for."""
    from headrace.plan.routing_traces import save_trace

    if (counts := handle.stats().speculation) is not None and options.acceptance is not None:
        write_file(options.acceptance, json.dumps(encode(counts)) + "\n")
        notes.print(f"tokens a pass: {options.acceptance} (for --accepted-from)")
    if recorder is not None and options.expert_trace is not None:
        recorded = recorder.close()
        save_trace(recorded, options.expert_trace)
        counted = f"{len(recorded.layers)} layers, {len(recorded.layers[0])} tokens"
        notes.print(f"choices of experts: {options.expert_trace} ({counted})")
    if options.trace is not None:
        handle.trace(options.trace)
        notes.print(f"trace: {options.trace} (open it at https://ui.perfetto.dev)")


def _print_plan(notes: Console, planned: PlanResult, is_whole: bool, is_predicted: bool) -> None:
    """Print the plan and its prediction for one sequence; in two lines, or whole."""
    from headrace.model.memory_profile import notes_on_experts
    from headrace.plan.tables import render

    plan, name = planned.plan, planned.plan.model_name or "model"
    rate, expected = _expectation(planned) if is_predicted or planned.speculation is not None else (0.0, "")
    if is_whole:
        notes.print(render(plan, name))
        lines = ["", f"weights: {_places(plan)}", planned.context.automatic, f"expected: {expected}" * bool(expected)]
        lines += notes_on_experts(planned.context.module, ())
    else:
        rates = "" if planned.planner.rates.is_measured else " by nominal rates"
        speed = f": {format_rate(rate)} tokens/s expected{rates}" * bool(expected)
        lines = [f"{name}{speed}", f"weights: {_places(plan)}"]
    for line in lines[:1] + list(filter(None, lines[1:])):
        print_line(notes, line)


def _expectation(planned: PlanResult) -> tuple[float, str]:
    """Tokens a second that `headrace plan` predicts with the same flags for one sequence, and how it comes to that."""
    planner, forecast = planned.planner, planned.speculation
    if forecast is not None:
        return forecast.tokens_per_s, str(forecast)
    step = planner.forecast(planned.plan, 1, planned.workload.context)
    hint = "" if planner.rates.is_measured else "; run `headrace probe` for better predictions"
    return step.rows_per_s, (
        f"{format_time(step.step_s)} per token ({format_rate(step.rows_per_s)} tokens/s), bound by {step.bound}, by "
        f"the rates of {planner.rates.machine}{hint}"
    )


def _places(plan: Plan) -> str:
    """The memory that weights are in, by the names of the figures at the end."""
    from headrace.plan.kinds import kind_of

    places = Counter({"device memory": plan.device_bytes})
    for store, num_bytes in plan.store_bytes.items():
        if store not in ("resident", "slots", "cache"):
            place, _, how = kind_of(store).label.partition(", ")
            name = {"host": "host memory", "file": "files"}.get(place, place)
            places[f"{name} ({how})" if how else name] += num_bytes
    sizes = ", ".join(f"{place} {format_size(num_bytes)}" for place, num_bytes in places.items() if num_bytes)
    return sizes if plan.offloaded_bytes else f"{sizes}; nothing is offloaded"


# -- arguments --------------------------------------------------------------------------------------------------------


def _check_length(prompt_tokens: int, new_tokens: int, longest: int | None, plan: Plan) -> None:
    """Refuse a text longer than the model or the plan was made for, before weights are loaded."""
    for limit, whose, fix in (
        (longest, "the model was made for (max_position_embeddings in its configuration)", ""),
        (plan.context, "the plan has memory for (--context)", f", or plan with --context {prompt_tokens + new_tokens}"),
    ):
        if limit and prompt_tokens + new_tokens > limit:
            left = limit - prompt_tokens
            shorter = f"use --max-new-tokens {left} or less" if left > 0 else "use a shorter prompt"
            raise OptionError(
                f"the prompt has {prompt_tokens} tokens, and {new_tokens} new ones (--max-new-tokens) make "
                f"{prompt_tokens + new_tokens}, more than the {limit} that {whose}; {shorter}{fix}"
            )


def _process_group(mode: str | None, device: torch.device) -> ProcessGroup | None:
    """The processes that torchrun started, where ``mode`` is a store of several, else ``None``; sets each one's GPU.

    Raises:
        OptionError: this process was started alone.
    """
    if mode not in RANK_MODES:
        return None
    import torch.distributed as dist

    if not dist.is_torchelastic_launched():
        raise OptionError(
            f"mode {mode} (of --offload-mode, or of the plan in --plan) stores the weights once for several "
            f"processes, and this one was started alone: start several with `torchrun --nproc-per-node N -m headrace "
            f"...`, or use --offload-mode cpu"
        )
    if not dist.is_initialized():
        dist.init_process_group("gloo")  # only its key-value store is used; NCCL would allocate GPU memory
    if device.type == "cuda" and device.index is None:
        import torch

        torch.cuda.set_device(dist.get_node_local_rank())  # or all processes of a host would use GPU 0
    return dist.group.WORLD


# -- the prompt -------------------------------------------------------------------------------------------------------


def _read_prompt(
    opened: OpenedModel, text: str, system: str | None, chat: bool | None, notes: Console, sampling: Any
) -> tuple[Any, dict[str, Any], bool]:
    """Tokenizer, token ids of the prompt, and whether it is in the chat template: if ``chat`` or ``system`` say so.

    Without both, the prompt of an instruct model gets its template, and a line in ``notes`` tells so.
    """
    with timed(_log, "tokenizer and chat template"):
        tokenizer = open_with_template(opened.folder, messages_of(text, system))
    opened.check_generation(tokenizer, {**opened.generation_settings, **sampling}, batched=False)
    if chat is None and system is None and is_instruct(tokenizer, opened):
        chat = True
        notes.print(
            "chat: this looks like an instruct model, so the prompt is a message in its chat template; --no-chat "
            "continues the text as it is",
            soft_wrap=True,
        )
    messages = messages_of(text, system) if chat or system is not None else None
    return tokenizer, tokenize(tokenizer, opened.folder, text, messages), messages is not None


# -- the text ---------------------------------------------------------------------------------------------------------


_HELP = """\
/clear         forget the conversation
/system TEXT   set the system message; without TEXT, show it
/exit          end; so do /quit, Ctrl-D, and Ctrl-C at the prompt
Ctrl-C ends an answer at its next token and keeps it; once more ends the chat"""


class _Answer(NamedTuple):
    """Ids of an answer, tokens and seconds after each of its first three steps, and all seconds, prompt included."""

    tokens: Any
    steps: list[tuple[int, float]]
    seconds: float


class _Conversation:
    """A chat: a message or a /command a line, each message answered with all before it."""

    def __init__(
        self, tokenizer: Any, folder: Path, system: str | None, answer: Callable[..., _Answer], notes: Console
    ) -> None:
        self._tokenizer, self._folder, self._answer, self._notes = tokenizer, folder, answer, notes
        self._first: list[dict[str, str]] = messages_of("", system)[:-1]
        self._turns: list[dict[str, str]] = []
        self._answers: list[_Answer] = []

    def run(self) -> list[_Answer]:
        """Read lines until /exit or the end of stdin."""
        with suppress(ImportError):
            import readline  # noqa: F401 - input() then edits its line and recalls the ones before
        while (line := _next_line()) is not None:
            command, _, text = line.strip().partition(" ")
            if command in ("/exit", "/quit"):
                break
            try:
                if line.startswith("/"):
                    self._obey(command, text.strip())
                elif command:
                    self._say(line.strip())
            except OptionError as error:
                if not sys.stdin.isatty():
                    raise
                print_error(f"{error} (/clear forgets the conversation)")
        return self._answers

    def _obey(self, command: str, text: str) -> None:
        if command == "/help":
            stderr.print(_HELP, markup=False)
        elif command == "/clear":
            self._turns.clear()
            print_line(self._notes, "the conversation is forgotten", "dim")
        elif command == "/system":
            if text:
                _utf8("stdin", text)
                tokenize(self._tokenizer, self._folder, text, messages_of("?", text))  # a template may refuse it
                self._first = messages_of("", text)[:-1]
            shown = self._first[0]["content"] if self._first else "none; /system TEXT sets it"
            print_line(stderr, f"system message: {shown}")
        else:
            print_line(stderr, f"no command {command}: /help lists them; a space before the / sends the line")

    def _say(self, text: str) -> None:
        _utf8("stdin", text)
        turns = [*self._turns, {"role": "user", "content": text}]
        inputs = tokenize(self._tokenizer, self._folder, text, [*self._first, *turns])
        with _stop_at_ctrl_c() as stopped:
            answer = self._answer(inputs, stopped)
        self._answers.append(answer)
        said = self._tokenizer.decode(answer.tokens, skip_special_tokens=True)
        self._turns = [*turns, {"role": "assistant", "content": said}]
        print_line(self._notes, f"{_speed([answer])}{' (ended by Ctrl-C)' if stopped else ''}", "dim")


def _next_line() -> str | None:
    """The next line of stdin; ``None`` at its end, or for Ctrl-C at the prompt."""
    asks = sys.stdin.isatty()
    if asks and not sys.stdout.isatty():  # where input() would write the prompt
        stderr.print("> ", end="")
    try:
        return input("> " if asks and sys.stdout.isatty() else "")
    except (EOFError, KeyboardInterrupt) as end:
        if isinstance(end, KeyboardInterrupt) and not asks:
            raise
    if asks:
        stderr.print()
    return None


@contextmanager
def _stop_at_ctrl_c() -> Iterator[list[int]]:
    """Within, at a terminal, the first Ctrl-C goes into the list; the next one interrupts, as it does elsewhere.

    An answer ends between two tokens, where the model is in no forward.
    """
    stopped: list[int] = []
    before = signal.getsignal(signal.SIGINT)

    def stop(number: int, _: object) -> None:
        stopped.append(number)
        signal.signal(number, before)

    signal.signal(signal.SIGINT, stop if sys.stdin.isatty() else before)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, before)


class _Printer:
    """A streamer of transformers' ``generate``; its first tokens are the prompt, which ``continues`` in the text."""

    def __init__(self, tokenizer: Any, *, continues: bool) -> None:
        self._decode, self._continues = partial(tokenizer.decode, skip_special_tokens=True), continues
        self._text: TokenText | None = None
        self._begin = time.perf_counter()
        self.steps: list[tuple[int, float]] = []  # tokens so far and seconds, after each of the first three
        self._tokens = 0

    def put(self, tokens: torch.Tensor) -> None:
        ids = tokens.flatten().tolist()
        if self._text is None:
            self._text = TokenText(self._decode, ids if self._continues else ())
        else:
            self._tokens += len(ids)
            if len(self.steps) < 3:
                self.steps.append((self._tokens, time.perf_counter() - self._begin))
                if len(self.steps) == 1:
                    _log.info("prompt and first token: %s", format_time(self.steps[0][1]))
            print("".join(map(self._text.add, ids)), end="", flush=True)

    def end(self) -> None:
        print("" if self._text is None else self._text.add(None), flush=True)


def _stream(
    module: Any, tokenizer: Any, inputs: dict[str, Any], options: GenerateOptions, printer: _Printer, stopped: Any
) -> _Answer:
    """Print the text while it is generated, until something is in the list ``stopped``, if that is given."""
    import torch

    torch.manual_seed(options.seed or 0)
    # One sequence is never padded, but transformers warns without an id; and without a mask of the tokenizer it masks
    # the tokens of the prompt that equal the id.
    eos = module.generation_config.eos_token_id
    pad_ids = [tokenizer.pad_token_id, *(eos if isinstance(eos, list) else [eos]), 0]
    begin, length = time.perf_counter(), inputs["input_ids"].shape[1]
    output = module.generate(
        **inputs,
        max_new_tokens=options.max_new_tokens,
        streamer=printer,
        pad_token_id=next(token for token in pad_ids if token is not None),
        return_dict_in_generate=False,
        **({} if module.generation_config.stop_strings is None else {"tokenizer": tokenizer}),
        **({} if stopped is None else {"stopping_criteria": [lambda *_, **__: bool(stopped)]}),
        **({} if (chunk := options.prefill_chunk_size) is None else {"prefill_chunk_size": min(chunk, length)}),
        **options.sampling(),
    )
    return _Answer(output[0, length:], printer.steps, time.perf_counter() - begin)


def _speed(answers: Sequence[_Answer]) -> str:
    """Tokens, the time to the first and to the third step, which warm up and capture graphs, and the rate since."""
    tokens = sum(len(answer.tokens) for answer in answers)
    following = sum(len(answer.tokens) - answer.steps[-1][0] for answer in answers)
    seconds = sum(answer.seconds - answer.steps[-1][1] for answer in answers)
    first_s, third_s = (sum(answer.steps[at][1] for answer in answers) / len(answers) for at in (0, -1))
    several = len(answers) > 1
    then = f", third step {format_time(third_s)}, then {format_rate(following / seconds)} tokens/s"
    return (
        f"{pluralize(tokens, 'token')}{f' in {len(answers)} answers' if several else ''}: first token "
        f"{format_time(first_s)}{' on average' if several else ''}{then if following else ''}"
    )


def _print_metrics(
    notes: Console, handle: Handle, answers: Sequence[_Answer], device: torch.device, growth_bytes: int
) -> None:
    import torch

    stats, seconds = handle.stats(), sum(answer.seconds for answer in answers)
    lines = [
        _speed(answers),
        f"{format_size(stats.bytes_moved)} moved ({stats.bytes_moved / seconds / 1e9:.2f} GB/s), "
        f"{pluralize(stats.stalls, 'stall')} ({format_time(stats.stall_s)})",
    ]
    if (counts := stats.speculation) is not None and counts.passes:
        each = format_size(stats.bytes_moved // max(1, counts.tokens))
        lines.append(f"{counts.passes} passes, {counts.tokens_per_pass:.2f} tokens each; {each} moved per token")
    planned = f"{format_size(handle.plan.device_bytes)} planned for weights"
    if device.type == "cuda":
        lines.append(f"device memory: {format_size(torch.cuda.max_memory_allocated(device))} at peak, {planned}")
    else:
        lines.append(f"device memory: {planned}, which a CPU has in host memory")
    peak = format_size(peak_rss_bytes())
    lines.append(f"host memory: {peak} at peak, {format_size(growth_bytes)} of it since loading began")
    lines += [note for note in stats.notes if note.startswith("experts on the CPU")]
    for line in lines:
        print_line(notes, line, "bold")
