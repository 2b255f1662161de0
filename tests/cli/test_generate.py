"""The promise: `headrace generate` asks the model as transformers would, and refuses what it could not end well."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation import GenerationMixin
from typer.testing import CliRunner

from commands import changed, error_of, plain_text, run, succeed, text_of, tiny_model, write_llama_tokenizer
from headrace.cli import app, commands_generate
from headrace.formatting import format_rate, format_time
from headrace.plan.plan import Plan
from heads import mellum
from models import aligned

model = tiny_model

# ChatML with the token that ends texts (an instruct model), and with one that does not (a base model's template).
TEMPLATE = (
    "{%% for m in messages %%}[{{ m.role }}]{{ m.content }}%s{%% endfor %%}"
    "{%% if add_generation_prompt %%}[assistant]{%% endif %%}"
)
LIMIT = 4096


@pytest.fixture
def with_template(model: Path, tmp_path: Path) -> Callable[..., Path]:
    """The model under a name, with a chat template whose turns end in a token."""

    def copy(name: str, end: str = "<|endoftext|>", template: str = TEMPLATE) -> Path:
        folder = Path(shutil.copytree(model, tmp_path / name))
        (folder / "chat_template.jinja").write_text(template % end)
        return folder

    return copy


def chat_text(folder: Path, *messages: tuple[str, str], **options: Any) -> str:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    conversation = [{"role": role, "content": content} for role, content in messages]
    inputs = tokenizer.apply_chat_template(
        conversation, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    return text_of(folder, {"input_ids": inputs["input_ids"]}, do_sample=False, **options)


def generate(folder: Path, *flags: object, prompt: str = "Water") -> Any:
    result = succeed("generate", folder, "--prompt", prompt, "--max-new-tokens", 12, "--device-memory", "2MiB", *flags)
    return result


# -- chat --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_instruct_model_gets_its_template_and_says_so(with_template: Callable[..., Path]) -> None:
    folder = with_template("tiny-instruct")
    chatted, plain = generate(folder), generate(folder, "--no-chat")
    assert chatted.stdout == chat_text(folder, ("user", "Water"), max_new_tokens=12)
    assert plain.stdout == plain_text(folder, "Water", max_new_tokens=12)
    assert chatted.stdout != plain.stdout
    assert [line for line in chatted.stderr.splitlines() if line.startswith("chat: ")] == [
        "chat: this looks like an instruct model, so the prompt is a message in its chat template; --no-chat continues "
        "the text as it is"
    ]
    assert "chat:" not in plain.stderr
    asked = generate(folder, "--chat")
    assert (asked.stdout, "chat:" in asked.stderr) == (chatted.stdout, False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "end"), [("tiny-base", "<|endoftext|>"), ("tiny_pt", "<|endoftext|>"), ("tiny", "<|pad|>")]
)
def test_a_base_model_continues_the_text_unless_asked(name: str, end: str, with_template: Callable[..., Path]) -> None:
    folder = with_template(name, end)
    result = generate(folder)
    assert result.stdout == plain_text(folder, "Water", max_new_tokens=12)
    assert "chat:" not in result.stderr
    assert generate(folder, "--chat").stdout == chat_text(folder, ("user", "Water"), max_new_tokens=12)


def test_turns_may_end_in_any_token_that_ends_texts(with_template: Callable[..., Path]) -> None:
    """generation_config.json may list several, as Llama 3's and Qwen 3's do."""
    folder = with_template("tiny", "<|pad|>")
    settings = folder / "generation_config.json"
    pad = AutoTokenizer.from_pretrained(folder).pad_token_id
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"eos_token_id": [1, pad]}))
    assert "chat: " in generate(folder).stderr


@pytest.mark.slow
def test_a_system_message_asks_for_chat(with_template: Callable[..., Path]) -> None:
    folder = with_template("tiny-base")
    expected = chat_text(folder, ("system", "Be brief."), ("user", "Water"), max_new_tokens=12)
    assert generate(folder, "--system", "Be brief.").stdout == expected


def test_a_chat_that_cannot_be(model: Path, with_template: Callable[..., Path]) -> None:
    args = ("generate", model, "--prompt", "a")
    for flags in (("--chat",), ("--system", "b")):
        assert "--chat, --system and `headrace chat` need a chat template, and the tokenizer in" in error_of(
            *args, *flags
        )
    assert "--system and --no-chat contradict each other" in error_of(*args, "--system", "b", "--no-chat")
    refuses = "{%% if messages[0].role == 'system' %%}{{ raise_exception('no system role') }}{%% endif %%}%s"
    folder = with_template("refuses", template=refuses)
    message = error_of("generate", folder, "--prompt", "a", "--system", "b")
    assert "refuses these messages (no system role); leave --system out" in message


def converse(folder: Path, *lines: str, **more: Any) -> Any:
    stdin = "".join(f"{line}\n" for line in lines)
    flags = ("--max-new-tokens", 12, "--device-memory", "2MiB", "--device", "cpu")
    return succeed("chat", folder, *flags, *more.get("flags", ()), stdin=stdin)


BOMBS = {
    "time": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "memory": "{{ '%99999999999d' % 1 }}",
    "length": "{{ 'x' * 20000000 }}",
    "a long message": "{{ ('x' * messages[0].content | length) * 700000 }}",
}


@pytest.mark.slow
@pytest.mark.parametrize(("verb", "bomb"), [
    pytest.param("generate", "time", marks=pytest.mark.slow),  # a second of the processor is the least limit
    *(("generate", bomb) for bomb in list(BOMBS)[1:]), ("chat", "memory"), ("serve", "memory"),
])  # fmt: skip
def test_a_template_that_takes_all_time_or_memory(
    verb: str, bomb: str, with_template: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one line before anything is loaded, and nothing of it runs in this process."""
    monkeypatch.setattr("headrace.cli.prompt._RENDER_S", 1)
    monkeypatch.setattr("headrace.cli.prompt._RENDER_BYTES", 2**28)
    folder = with_template("m-Instruct", template=BOMBS[bomb].replace("%", "%%") + "%s")
    message = error_of(verb, folder, *(["--prompt", "x" * 30] if verb == "generate" else []))
    assert f"{folder}: expected a chat template that renders within 1 s and 256.00 MiB, found one that" in message


@pytest.mark.slow
def test_a_chat_remembers_what_was_said(with_template: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    asked, stream = [], commands_generate._stream

    def watch(module: Any, tokenizer: Any, inputs: dict[str, Any], *rest: Any) -> Any:
        asked.append(tokenizer.decode(inputs["input_ids"][0]))
        return stream(module, tokenizer, inputs, *rest)

    monkeypatch.setattr(commands_generate, "_stream", watch)
    folder = with_template("tiny-instruct")
    first = chat_text(folder, ("system", "Be brief."), ("user", "Water"), max_new_tokens=12)
    said = first.removesuffix("\n")
    turns = (("system", "Be brief."), ("user", "Water"), ("assistant", said), ("user", "Fire"))
    second = chat_text(folder, *turns, max_new_tokens=12)
    done = converse(folder, "Water", "", "Fire", flags=("--system", "Be brief."))
    assert done.stdout == first + second
    assert done.stderr.count("12 tokens: first token ") == 2
    assert "24 tokens in 2 answers: first token " in done.stderr
    assert "moved" in done.stderr
    assert " 0 B moved (" not in done.stderr
    end = "<|endoftext|>"
    assert asked[1] == f"{asked[0]}{said}{end}[user]Fire{end}[assistant]"


def test_a_chat_ends(with_template: Callable[..., Path]) -> None:
    folder = with_template("tiny-instruct")
    for lines in ((), ("/exit", "Water")):
        done = converse(folder, *lines)
        assert (done.stdout, "first token" in done.stderr) == ("", False)


def test_a_chat_that_cannot_be_held(model: Path, with_template: Callable[..., Path]) -> None:
    assert "`headrace chat` need a chat template" in error_of("chat", model)
    folder = with_template("tiny-instruct")
    message = error_of("chat", folder, "--device-memory", "2MiB", "--offload-mode", "shm_cpu")
    assert "mode shm_cpu is for several processes, and a chat has one" in message
    assert "(--max-new-tokens) make" in error_of("chat", folder, "--max-new-tokens", 100_000)


@pytest.mark.slow
def test_commands_of_a_chat(with_template: Callable[..., Path]) -> None:
    """None goes to the model; a space before the / sends the line."""
    folder = with_template("tiny-instruct")
    lines = (
        "Water",
        "/system Be brief.",
        "/system",
        "/clear",
        "Fire",
        "/nothing here",
        "/help",
        " /etc",
        "/quit",
        "Never",
    )
    done = converse(folder, *lines)
    system = ("system", "Be brief.")
    second = chat_text(folder, system, ("user", "Fire"), max_new_tokens=12)
    turns = (system, ("user", "Fire"), ("assistant", second.removesuffix("\n")), ("user", "/etc"))
    first, third = (chat_text(folder, *each, max_new_tokens=12) for each in ((("user", "Water"),), turns))
    assert done.stdout == first + second + third
    told = done.stderr.splitlines()
    assert told.count("system message: Be brief.") == 2
    assert "no command /nothing: /help lists them; a space before the / sends the line" in told
    assert [line.split()[0] for line in told if line.startswith("/")] == ["/help", "/clear", "/system", "/exit"]


@pytest.mark.slow
def test_three_lines_come_before_the_prompt(with_template: Callable[..., Path]) -> None:
    """And the plan with -v; no bar in a pipe, and figures fit 80 columns."""
    folder = with_template("tiny-instruct")
    told = converse(folder, "Water").stderr.splitlines()
    assert [told[0].split(": ")[0], *told[1:3]] == [
        "tiny-instruct",
        "weights: device memory 1.94 MiB, files 1.69 MiB",
        "/help lists commands; Ctrl-C ends an answer, Ctrl-D or /exit the chat",
    ]
    assert [line.split(" ")[0] for line in told[3:]] == ["12", "12", told[5].split()[0], "device", "host"]
    assert "device memory: 1.94 MiB planned for weights, which a CPU has in host memory" in told
    assert max(map(len, told)) <= 80
    verbose = converse(folder, "Water", "/exit", flags=("-v",)).stderr
    for part in ("tokenizer and chat template", "weights", "prompt and first token"):
        assert f"headrace.cli.commands_generate: {part}: " in verbose
    assert "Tensors by role" in verbose


def at_a_terminal(run: Callable[[], object], *steps: tuple[str, str]) -> tuple[str, int]:
    """What ``run`` prints at a terminal, where each text is awaited and answered, and its exit code."""
    pid, terminal = pty.fork()  # without exec, as imports take four seconds
    if not pid:
        code = 1
        try:
            os.environ["TERM"] = "dumb"
            sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
            signal.signal(signal.SIGINT, signal.default_int_handler)
            run()
        except SystemExit as end:
            code = int(end.code or 0)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    shown, at, end = "", 0, time.monotonic() + 60
    for text, sent in [*steps, ("\0", "")]:
        while text not in shown[at:] and time.monotonic() < end:
            if select.select([terminal], [], [], 0.2)[0]:
                try:
                    shown += os.read(terminal, 4096).decode(errors="replace")
                except OSError:  # it has ended
                    break
        if text in shown[at:]:
            at = shown.index(text, at) + len(text)
            time.sleep(0.3)  # a signal between the prompt and the wait for a key has no effect in CPython
            os.write(terminal, sent.encode())
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL if time.monotonic() > end else 0)
    os.close(terminal)
    return shown, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.slow
def test_ctrl_c_ends_an_answer_and_keeps_the_chat(
    with_template: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the prompt it ends the chat; between the two the partial answer is in the conversation."""
    folder = with_template("tiny-instruct")
    read, put = commands_generate.tokenize, commands_generate._Printer.put

    def tokenize(tokenizer: Any, folder: Path, text: str, messages: list[dict[str, str]]) -> Any:
        print("ASKED", [turn["role"] for turn in messages], flush=True)
        return read(tokenizer, folder, text, messages)

    def put_slowly(self: Any, tokens: Any) -> None:
        put(self, tokens)
        time.sleep(0.5)  # long enough to be interrupted
        print("TOKEN", flush=True)

    def chat() -> None:
        monkeypatch.setattr(commands_generate, "tokenize", tokenize)
        monkeypatch.setattr(commands_generate._Printer, "put", put_slowly)
        app(["chat", str(folder), "--device", "cpu", "--max-new-tokens", "200"])

    shown, exit_code = at_a_terminal(
        chat, ("/exit the chat", "Water\n"), ("TOKEN", ""), ("TOKEN", "\x03"), ("Ctrl-C)", "Fire\n"),
        ("TOKEN", ""), ("TOKEN", "\x03"), ("Ctrl-C)", ""), ("> ", "\x03"),
    )  # fmt: skip
    assert exit_code == 0, shown
    assert shown.count("(ended by Ctrl-C)") == 2
    assert "ASKED ['user', 'assistant', 'user']" in shown
    assert " tokens in 2 answers: first token " in shown
    assert "Traceback" not in shown
    shown, exit_code = at_a_terminal(chat, ("/exit the chat", "Water\n"), ("TOKEN", "\x03"), ("^C", "\x03"))
    assert (exit_code, "interrupted" in shown) == (130, True), shown


# -- a model that is not there -----------------------------------------------------------------------------------------


HUB_FILES = {
    "config.json": 10**6, "model-1.safetensors": 16 * 10**9, "a/model.safetensors": 10**12, "run.py": 10**12,
    "tokenizer.model": 4 * 10**8, "pytorch_model.bin": 10**12, "consolidated.safetensors": 10**12,
}  # fmt: skip
FETCHED = "FETCHED org/unheard-of ['config.json', 'model-1.safetensors', 'tokenizer.model']"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Hub that says what is fetched of the model, of which nothing is here."""

    def model_info(name: str, files_metadata: bool, timeout: float) -> SimpleNamespace:
        return SimpleNamespace(
            siblings=[SimpleNamespace(rfilename=file, size=size) for file, size in HUB_FILES.items()]
        )

    def snapshot_download(name: str, **options: Any) -> None:
        if options.get("local_files_only"):
            raise OSError("not here")
        print("FETCHED", name, sorted(options["allow_patterns"]))
        sys.exit(0)

    monkeypatch.setattr(huggingface_hub, "model_info", model_info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)


@pytest.mark.slow
@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(("answer", "exit_code"), [("y", 0), ("n", 2), ("", 2)])
def test_a_download_is_asked_for_at_a_terminal(answer: str, exit_code: int) -> None:
    """With the size of what is loaded: no code, no pickles, no second copy."""
    question = "download org/unheard-of (16.4 GB)? [y/N]"
    shown, code = at_a_terminal(lambda: app(["generate", "org/unheard-of", "--prompt", "a"]), (question, f"{answer}\n"))
    assert (code, FETCHED in shown, "not downloaded, as you said" in " ".join(shown.split())) == (
        exit_code, exit_code == 0, exit_code == 2,
    ), shown  # fmt: skip


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(("flags", "told"), [
    ((), "`hf download org/unheard-of --include \"*.json\"`; or add --download"),
    (("--download",), "downloading org/unheard-of (16.4 GB)"),
])  # fmt: skip
def test_a_download_without_a_terminal(flags: tuple[str, ...], told: str) -> None:
    """A yes on stdin is no answer."""
    done = run("generate", "org/unheard-of", "--prompt", "a", *flags, stdin="y\n")
    assert (done.exit_code, FETCHED in done.stdout) == ((0, True) if flags else (2, False)), done.stderr
    assert told in done.stderr.splitlines()[-1]


@pytest.mark.usefixtures("hub")
def test_a_download_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def model_info(*_: object, **__: object) -> None:
        raise OSError("no route to the host\nsecond line")

    monkeypatch.setattr(huggingface_hub, "model_info", model_info)
    told = "the Hub does not give it (OSError: no route to the host); check the name"
    assert told in error_of("generate", "org/unheard-of", "--prompt", "a", "--download")


def test_weights_that_are_missing_are_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name of which a cache has the config alone is not there; a folder of that kind is told as before."""
    snapshot = tmp_path / "models--org--config" / "snapshots" / ("1a2b" * 10)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    refs = tmp_path / "models--org--config" / "refs"
    refs.mkdir()
    (refs / "main").write_text(snapshot.name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    index = snapshot / "model.safetensors.index.json"
    for placed in (None, {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}):
        if placed is not None:
            index.write_text(json.dumps(placed))
            (snapshot / "model-1.safetensors").touch()
        message = error_of("generate", "org/config", "--prompt", "a")
        assert "expected all safetensors files of org/config, found some missing: `hf download org/config`" in message
        assert message.endswith("; or add --download")
    assert "--download" not in error_of("generate", snapshot, "--prompt", "a")


# -- sampling ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_top_p_and_top_k_sample_as_transformers_does(model: Path) -> None:
    ids = {"input_ids": AutoTokenizer.from_pretrained(model)("Water", return_tensors="pt").input_ids}
    texts = set()
    for flags, options in (
        (("--top-k", 3), {"top_k": 3}),
        (("--top-p", 0.4), {"top_p": 0.4}),
        (("--top-k", 200, "--top-p", 0.99), {"top_k": 200, "top_p": 0.99}),
    ):
        torch.manual_seed(5)
        expected = text_of(model, ids, max_new_tokens=12, do_sample=True, temperature=2.0, **options)
        result = generate(model, "--temperature", 2.0, "--seed", 5, *flags)
        assert result.stdout == expected
        texts.add(expected)
    assert len(texts) == 3, "the options have an effect"


@pytest.mark.slow
def test_a_prompt_in_chunks(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, run_prompt, prompt = [], GenerationMixin._prefill, "Water is water " * 4

    def prefill(self: Any, ids: torch.Tensor, config: Any, *args: Any, **kwargs: Any) -> Any:
        sizes.append((config.prefill_chunk_size, ids.shape[1] > 8))
        return run_prompt(self, ids, config, *args, **kwargs)

    expected = plain_text(model, prompt, max_new_tokens=12, prefill_chunk_size=4)
    monkeypatch.setattr(GenerationMixin, "_prefill", prefill)
    chunks = "--prefill-chunk-size", 4
    assert generate(model, *chunks, prompt=prompt).stdout == expected
    assert sizes == [(4, True)]
    assert (
        generate(model, "--prefill-chunk-size", 10**30, prompt=prompt).stdout == generate(model, prompt=prompt).stdout
    )
    message = error_of("generate", model, "--prompt", prompt, *chunks, "--speculate", "lookup")
    assert "--prefill-chunk-size has no effect beside --speculate; leave one of them out" in message


def test_a_prompt_that_does_not_fit(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB. GPU 0 has a total capacity of 9")

    monkeypatch.setattr(commands_generate, "_stream", refuse)
    message = error_of("generate", model, "--prompt", "Water is", "--device-memory", "2MiB")
    assert re.search(
        r"a prompt of \d tokens and its answer do not fit beside 1\.\d+ MiB of weights: CUDA out of memory\. Tried to "
        r"allocate 8\.00 GiB; leave more memory \(a smaller --device-memory\), or read the prompt in parts ",
        message,
    ), message


def test_graphs_cannot_be_turned_off_where_there_are_none(model: Path) -> None:
    message = error_of("generate", model, "--prompt", "a", "--no-graphs", "--device", "cpu")
    assert "--no-graphs has no effect on cpu, which has no CUDA graphs; leave it out" in message


def test_sampling_options_without_sampling(model: Path) -> None:
    args = ("generate", model, "--prompt", "a")
    for flag, value in (("--top-p", 0.9), ("--top-k", 5), ("--seed", 1)):
        for cold in ((), ("--temperature", 0)):
            message = error_of(*args, flag, value, *cold)
            assert f"{flag} has no effect on greedy decoding; add --temperature 0.7, for example" in message
    for wrong in (0, 1.5, "nan"):
        message = error_of(*args, "--temperature", 1, "--top-p", wrong)
        assert f"--top-p {wrong}: expected a probability above 0, at most 1" in message


@pytest.mark.parametrize(("flags", "message"), [
    (("--seed", 2**64, "--temperature", 1), f"--seed {2**64}: expected a number of at most 64 bits, such as --seed 1"),
    (("--seed", -(2**63) - 1, "--temperature", 1), "expected a number of at most 64 bits"),
    (("--temperature", 1e-320), "--temperature 9.99989e-321: expected 0 (greedy), or a temperature above"),
    (("--temperature", -1), "--temperature -1: expected 0 (greedy), or a temperature above, such as --temperature 0.7"),
    (("--prompt", "caf\udce9"), "--prompt: expected text in UTF-8, found other bytes in 'caf\\udce9'"),
    (("--system", "caf\udce9"), "--system: expected text in UTF-8, found other bytes in 'caf\\udce9'"),
])  # fmt: skip
def test_values_that_torch_or_the_tokenizer_cannot_take(model: Path, flags: tuple[Any, ...], message: str) -> None:
    """Their errors named no flag."""
    assert message in error_of("generate", model, "--prompt", "a", *flags)


@pytest.mark.slow
@pytest.mark.parametrize("words", [("generate", "--prompt", "-"), ("chat",)])
def test_stdin(with_template: Callable[..., Path], words: tuple[str, ...]) -> None:
    """With bytes that are no UTF-8, in any locale, or closed."""
    verb, *flags = words
    folder = with_template("tiny-instruct")
    result = CliRunner().invoke(app, [verb, str(folder), *flags], input=b"caf\xe9\n")
    assert result.exit_code == 2
    assert "error: stdin: expected text in UTF-8, found other bytes in 'caf\\udce9" in result.stderr
    command = ["sh", "-c", 'exec "$@" <&-', "-", sys.executable, "-m", "headrace", verb, folder, *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert " is read from stdin, which is closed; start headrace without <&-" in done.stderr


# -- generation_config.json --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("nothing_is_loaded")
@pytest.mark.parametrize(("fields", "message"), [
    ({"num_beams": 2}, "num_beams = 2: it is not applied here"),
    ({"num_return_sequences": 2}, "num_return_sequences = 2: it is not applied here"),
    ({"cache_implementation": "offloaded"}, "cache_implementation = offloaded: it is not applied here"),
    ({"cache_implementation": "fast"}, "cache_implementation = fast: Invalid `cache_implementation`"),
    ({"dola_layers": "low"}, "dola_layers = low: it is not applied here"),
    ({"eos_token_id": "x"}, "eos_token_id = x: expected the number of a token"),
    ({"eos_token_id": 2**70}, f"eos_token_id = {2**70}: "),
    ({"pad_token_id": float("nan")}, "pad_token_id = nan: expected the number of a token"),
    ({"bad_words_ids": [[-1]]}, "bad_words_ids = [[-1]]: "),
    ({"bad_words_ids": "x"}, "bad_words_ids = x: "),
    ({"bad_words_ids": [[10**9]]}, "bad_words_ids = [[1000000000]]: "),
    ({"suppress_tokens": "x"}, "suppress_tokens = x: "),
    ({"min_new_tokens": "x"}, "min_new_tokens = x: "),
    ({"min_length": float("nan")}, "min_length = nan: expected a finite number"),
    ({"repetition_penalty": float("inf")}, "repetition_penalty = inf: expected a finite number"),
    ({"max_new_tokens": -1}, "max_new_tokens = -1: `max_new_tokens` must be greater than 0"),
    ({"stop_strings": [5]}, "stop_strings = [5]: "),
    ({"stop_strings": [""]}, "stop_strings = ['']: "),
    ({"max_time": "x"}, "max_time = x: "),
    ({"sequence_bias": {"x": 1}}, "sequence_bias = {'x': 1}: "),
    ({"watermarking_config": {"x": 1}}, "watermarking_config = {'x': 1}: "),
    ({"exponential_decay_length_penalty": 3}, "exponential_decay_length_penalty = 3: "),
])  # fmt: skip
def test_settings_that_are_refused(model: Path, tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    """Before weights are loaded, and by name."""
    found = error_of(
        "generate", changed(model, tmp_path / "settings", "generation_config.json", **fields), "--prompt", "a"
    )
    assert f"/generation_config.json: {message}" in found
    assert found.endswith("; take it out of the file")


@pytest.mark.slow
@pytest.mark.parametrize("fields", [
    {"return_dict_in_generate": True, "output_scores": True}, {"stop_strings": ["a", "e", "1"]}, {"min_length": 3},
    {"repetition_penalty": 1.05, "temperature": 0, "top_k": -1, "top_p": "x"}, {"pad_token_id": -1}, {"unknown": [1]},
])  # fmt: skip
def test_settings_that_are_applied(model: Path, tmp_path: Path, fields: dict[str, Any]) -> None:
    folder = changed(model, tmp_path / "settings", "generation_config.json", **fields)
    shown = {"return_dict_in_generate": False, "tokenizer": AutoTokenizer.from_pretrained(folder)}
    ids = {"input_ids": AutoTokenizer.from_pretrained(folder)("Water", return_tensors="pt").input_ids}
    greedy: dict[str, Any] = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
    assert generate(folder).stdout == text_of(folder, ids, max_new_tokens=12, **shown, **greedy)


# -- output ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_quiet_prints_the_text_and_errors(with_template: Callable[..., Path], tmp_path: Path) -> None:
    folder = with_template("tiny-instruct")
    loud, trace = generate(folder), tmp_path / "trace.json"
    assert "warning: " in generate(folder, "--device-memory", "1GiB").stderr
    result = generate(folder, "--quiet", "--device-memory", "1GiB", "--trace", trace)
    assert (result.stdout, result.stderr) == (loud.stdout, "")
    assert trace.exists()
    assert "--top-k has no effect" in error_of("generate", folder, "--prompt", "a", "--quiet", "--top-k", 3)


@pytest.mark.slow
def test_the_expectation_is_that_of_the_plan(model: Path) -> None:
    """Of one sequence, with a context and without."""
    for flags in (("--device-memory", "2MiB"), ("--device-memory", "16MiB", "--context", 64)):
        planned = json.loads(run("plan", model, "--device", "cpu", "--json", *flags).stdout)["prediction"]["steps"][0]
        told = [line for line in generate(model, *flags).stderr.splitlines() if line.startswith("expected: ")]
        expected = (
            f"{format_time(planned['step_s'])} per token ({format_rate(planned['rows_per_s'])} tokens/s), bound by "
        )
        assert len(told) == 1
        assert told[0].startswith(f"expected: {expected}{planned['bound']}, by the rates of ")
    assert "expected: " not in generate(model, "--quiet").stderr


@pytest.mark.slow
def test_a_tokenizer_that_strips_the_first_space(model: Path, tmp_path: Path) -> None:
    """The text goes on behind the prompt, also after a new line; the answer of a chat begins a text."""
    folder = Path(shutil.copytree(model, tmp_path / "llama"))
    write_llama_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE % "")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    resident: Any = aligned(AutoModelForCausalLM.from_pretrained(folder).eval())
    spaces = 0
    for prompt in ("x", "one two", "Be here!"):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        tokens = resident.generate(ids, max_new_tokens=4, do_sample=False)[0].tolist()
        decoded = [tokenizer.decode(each, skip_special_tokens=True) for each in (tokens, ids[0])]
        wanted = decoded[0][len(decoded[1]) :]
        assert generate(folder, "--no-chat", "--max-new-tokens", 4, prompt=prompt).stdout == wanted + "\n"
        spaces += wanted.startswith(" ")
    assert spaces > 1
    assert generate(folder, "--chat", "--max-new-tokens", 4, prompt=prompt).stdout == chat_text(
        folder, ("user", prompt), max_new_tokens=4
    )


# -- dtype and attention -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_attention_by_name(model: Path) -> None:
    expected = plain_text(model, "Water", max_new_tokens=12)
    assert generate(model, "--attn-implementation", "eager").stdout == expected
    message = error_of("generate", model, "--prompt", "a", "--attn-implementation", "fast")
    assert "attn_implementation 'fast': expected one that transformers" in message
    message = error_of("generate", model, "--prompt", "a", "--attn-implementation", "flash_attention_2")
    assert "attn_implementation 'flash_attention_2': Qwen3ForCausalLM cannot be built with it here" in message
    assert "installed; leave it out, or name another" in message


def test_a_dtype_by_name(model: Path) -> None:
    expected = plain_text(model, "Water", max_new_tokens=12, dtype=torch.float16)
    assert generate(model, "--dtype", "float16", "--offload-mode", "cpu").stdout == expected
    for verb in (("plan", model), ("generate", model, "--prompt", "a")):
        assert error_of(*verb, "--dtype", "int4") == "error: --dtype 'int4': expected one of bfloat16, float16, float32"


@pytest.mark.slow
def test_a_plan_for_another_dtype_is_carried_out(model: Path, tmp_path: Path) -> None:
    """Streamed from the unmodified files, of whose bytes half arrive; without the flag it is for another model."""
    plan, args = tmp_path / "plan.json", ("--prompt", "Water", "--max-new-tokens", 12)
    made = succeed("plan", model, "--dtype", "bfloat16", "--device-memory", "1MiB", "--save", plan)
    assert "tiny: 1.63 MiB of weights" in made.stdout
    result = succeed("generate", model, *args, "--dtype", "bfloat16", "--plan", plan)
    assert result.stdout == plain_text(model, "Water", max_new_tokens=12, dtype=torch.bfloat16)
    assert Plan.load(plan).mode == "disk"
    assert re.search(r"^\d+\.\d+ MiB moved", result.stderr, re.M)
    assert "was made for another model" in error_of("generate", model, *args, "--plan", plan)


# -- lengths -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("nothing_is_loaded")
def test_a_text_longer_than_the_model_is_refused_first(model: Path) -> None:
    args = ("generate", model, "--prompt")
    message = error_of(*args, "Water", "--max-new-tokens", LIMIT - 4)
    assert f"the prompt has 5 tokens, and {LIMIT - 4} new ones (--max-new-tokens) make {LIMIT + 1}" in message
    assert f"more than the {LIMIT} that the model was made for (max_position_embeddings" in message
    assert f"use --max-new-tokens {LIMIT - 5} or less" in message
    assert "use a shorter prompt" in error_of(*args, "W" * LIMIT)
    assert "weights are loaded" in error_of(*args, "Water", "--max-new-tokens", LIMIT - 5)


@pytest.mark.usefixtures("nothing_is_loaded")
@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}, 8192),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 2048}, LIMIT),
        ({"rope_type": "dynamic", "factor": 2.0}, 2 * LIMIT),
        ({"rope_type": "default"}, LIMIT),
    ],
)
def test_rope_scaling_makes_texts_longer(model: Path, tmp_path: Path, rope: dict[str, Any], limit: int) -> None:
    stated = {**rope, "rope_theta": 10000.0}
    folder = changed(model, tmp_path / "long", "config.json", rope_parameters=stated)
    message = error_of("generate", folder, "--prompt", "Water", "--max-new-tokens", limit)
    assert f"more than the {limit} that the model was made for" in message


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_is_loaded")
def test_a_text_longer_than_the_plan_is_refused_first(model: Path, tmp_path: Path) -> None:
    args = ("generate", model, "--prompt", "Water", "--device-memory", "3MiB", "--context", 32, "--max-new-tokens")
    message = error_of(*args, 28)
    assert (
        "make 33, more than the 32 that the plan has memory for (--context); use --max-new-tokens 27 or less" in message
    )
    assert message.endswith("or plan with --context 33")
    plan = tmp_path / "plan.json"
    assert run("plan", model, "--device-memory", "3MiB", "--context", 32, "--save", plan).exit_code == 0
    by_file = ("generate", model, "--prompt", "Water", "--plan", plan, "--max-new-tokens", 28)
    assert "more than the 32 that the plan has memory for" in error_of(*by_file)


class TestSpeculation:
    @pytest.mark.slow
    def test_the_text_and_what_it_took(self, model: Path, tmp_path: Path) -> None:
        """The tokens of the resident model with the same number of guesses; then a plan from what was measured."""
        counted = tmp_path / "accepted.json"
        flags = ("--offload-group-size", 2, "--speculate", "lookup", "--guesses", 3, "--acceptance", counted)
        result = succeed("generate", model, "--prompt", "one two one two one", "--max-new-tokens", 24, *flags)
        inputs = AutoTokenizer.from_pretrained(model)("one two one two one", return_tensors="pt")
        expected = text_of(model, inputs, max_new_tokens=24, do_sample=False, prompt_lookup_num_tokens=3)
        assert result.stdout == expected
        found = json.loads(counted.read_text())
        assert (found["guesser"], found["guesses"]) == ("lookup", 3)
        each = found["tokens"] / found["passes"]
        error = " ".join(result.stderr.split())
        assert "expected: speculation with 3 guesses by lookup: 1.4 tokens a pass (assumed)" in error
        assert f"{found['passes']} passes, {each:.2f} tokens each" in error
        assert "moved per token" in error
        assert "0 B moved" not in error
        group = ("--offload-group-size", 2, "--speculate", "lookup", "--accepted-from", counted)
        table = (
            succeed("plan", model, *group, "--machine", "4090").stdout if each > 1.1 else f"{each:.1f} tokens a pass"
        )
        assert f"{each:.1f} tokens a pass" in " ".join(table.split())

    @pytest.mark.slow
    def test_heads_of_the_model(self, model: Path, tmp_path: Path) -> None:
        """The tokens of transformers alone, and no word of its own about what it reads."""
        tokenizer = AutoTokenizer.from_pretrained(model)
        folder = mellum(tmp_path, vocabulary=len(tokenizer))
        tokenizer.save_pretrained(folder)
        flags = ("--offload-group-size", 2, "--speculate", "mtp", "--accepted", 1.9)
        result = succeed("generate", folder, "--prompt", "one two one", "--max-new-tokens", 24, *flags)
        inputs = tokenizer("one two one", return_tensors="pt")
        assert result.stdout == text_of(folder, inputs, max_new_tokens=24, do_sample=False, use_mtp=True)
        error = " ".join(result.stderr.split())
        assert "expected: speculation with 1 guess by mtp: 1.9 tokens a pass (as given)" in error
        assert re.search(r" 1[0-9] passes, [12]\.\d\d tokens each; \d.* moved per token", error)
        assert "Loading weights" not in error

    def test_where_it_loses(self, model: Path) -> None:
        """On the command line it is refused, with the figures."""
        flags = ("--offload-group-size", 2, "--speculate", "lookup", "--accepted", 1)
        for verb in (("plan", model), ("generate", model, "--prompt", "x")):
            assert "tokens/s in place of" in error_of(*verb, *flags)

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            (("--guesses", 3), "--guesses has no effect without --speculate"),
            (("--acceptance", "x.json"), "--acceptance has no effect without --speculate"),
            (("--speculate", "lookup", "--accepted", 2, "--accepted-from", "x"), "contradict each other"),
            (
                ("--speculate", "lookup", "--accepted-from", "x"),
                "expected a file of `headrace generate --acceptance FILE`",
            ),
            (("--speculate", "looup"), "--speculate: neither lookup, mtp nor a draft model: 'looup'"),
        ],
    )
    def test_flags_that_do_not_fit(self, flags: tuple[object, ...], message: str, model: Path) -> None:
        assert message in error_of("generate", model, "--prompt", "x", "--offload-group-size", 2, *flags)
