"""The command line inside the test process."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import shutil
from pathlib import Path
from string import ascii_letters
from typing import Any

import pytest
import typer.testing
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, TextStreamer
from typer.testing import CliRunner

from headrace.cli import app
from headrace.cli.demo_run import ModelSize, ensure_model
from models import aligned

typer.testing._get_command = functools.cache(typer.testing._get_command)  # made of the same functions each time

TINY = ModelSize(hidden=128, intermediate=384, layers=4, heads=4, key_value_heads=2)
# Of every verb that offloads, in the order of its help.
OFFLOAD_FLAGS = [
    "--device-memory", "--batch", "--context", "--host-memory", "--peer-memory", "--offload-backend",
    "--cpu-offload-gb", "--cpu-offload-params", "--offload-group-size", "--offload-num-in-group",
    "--offload-prefetch-step", "--offload-params", "--offload-rule", "--expert-slots", "--offload-mode",
    "--offload-codec", "--device", "--plan", "--disk-direct", "--disk-drop-cache",
]  # fmt: skip


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A causal language model of 4 MB, with a byte-level tokenizer and without a chat template."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    ensure_model(folder, TINY)
    return folder


def changed(model: Path, folder: Path, file: str, **fields: Any) -> Path:
    """``folder``, a copy of ``model`` with other values in one of its JSON files."""
    shutil.copytree(model, folder)
    path = folder / file
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **fields}))
    return folder


def text_of(folder: Path, inputs: Any, **options: Any) -> str:
    """What transformers alone prints for ``inputs``."""
    model = aligned(AutoModelForCausalLM.from_pretrained(folder, dtype=options.pop("dtype", None)).eval())
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        streamer = TextStreamer(AutoTokenizer.from_pretrained(folder), True, skip_special_tokens=True)
        model.generate(**inputs, streamer=streamer, **options)
    return printed.getvalue()


def plain_text(folder: Path, prompt: str, **options: Any) -> str:
    """What transformers alone prints for a text that it continues."""
    inputs = AutoTokenizer.from_pretrained(folder)(prompt, return_tensors="pt", return_token_type_ids=False)
    return text_of(folder, inputs, **{"do_sample": False, **options})


def write_llama_tokenizer(folder: Path) -> None:
    """One as of Llama 2: a text begins with a space that decoding takes off, and some tokens are bytes."""
    letters = [*ascii_letters, *",.!?'"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in b"\n\xc3\xa9\xff"), "\u2581", *letters]
    tokens += ["\u2581" + letter for letter in letters] + [letter + "e" for letter in letters[:40]]
    tokens += ["\u2581" + letter + "e" for letter in letters[:40]]
    merges = [(token[:-1], token[-1]) for token in tokens[len(letters) + 8 :]]
    vocabulary = {token: at for at, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.add_special_tokens(tokens[:3])
    wrapped: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", bos_token="<s>")
    wrapped.save_pretrained(folder)


def run(*args: object, stdin: str | None = None) -> Any:
    """The command line in this process: exit_code, stdout, stderr."""
    return CliRunner().invoke(app, [str(arg) for arg in args], input=stdin, prog_name="headrace")


def succeed(*args: object, stdin: str | None = None) -> Any:
    """:func:`run`, which has to end with exit code 0."""
    result = run(*args, stdin=stdin)
    assert result.exit_code == 0, result.output
    return result


def error_of(*args: object) -> str:
    """The one line that the failing command prints; nothing goes to stdout."""
    result = run(*args)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert "Traceback" not in result.stderr
    return lines[0]
