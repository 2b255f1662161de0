"""The promise: a newcomer with one card gets an answer to the first questions, without any file of a model.

Each question is a command and what its output has to say: words, sizes within a tolerance, and the exit status.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from commands import changed, run, tiny_model
from published_configs import QWEN3_8B, QWEN3_30B_A3B

model = tiny_model

_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@dataclass(frozen=True)
class Size:
    """A size in the output, with the text around it: `{}` stands for the size."""

    text: str
    gb: float
    tolerance: float = 0.02

    def is_in(self, output: str) -> bool:
        pattern = re.escape(self.text).replace(r"\{\}", r"([\d.,]+) ([KMG]?i?B)\b")
        found = [float(n.replace(",", "")) * _UNITS[unit] / 1e9 for n, unit in re.findall(pattern, output)]
        return any(gb == pytest.approx(self.gb, rel=self.tolerance) for gb in found)


@dataclass(frozen=True)
class Question:
    """What a newcomer asks, what they type, and the facts of the answer.

    ``config``: of a folder with nothing else, `FOLDER` in the command. `TINY` is a model with all its files, and
    `CHATTY` the same with a chat template.
    """

    asks: str
    command: str
    facts: tuple[str | Size, ...]
    config: dict[str, Any] | None = None
    exit_code: int = 0
    stdin: str | None = None
    never: tuple[str, ...] = field(default=("Traceback",))


def quantised(config: dict[str, Any], **stated: object) -> dict[str, Any]:
    return {**config, "quantization_config": stated}


def weighs(gb: float) -> Size:
    return Size("weighs {}", gb)


def holds(gb: float) -> Size:
    return Size("{} of weights", gb)


NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
DOUBLE = {**NF4, "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "bfloat16"}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
AUTO = "--device-memory auto --context 4096"

# Bytes of weights: of the embedding and the head in 16 bits 2.49 GB for Qwen3-8B, and 6.95e9 weights in its linear
# layers, which take a half byte and a scale per group in four bits.
QUESTIONS = [
    # -- models by name, without a file
    Question("How large is it?", "plan Qwen/Qwen3-8B", (weighs(16.38), "smallest budget")),
    Question("And without its organisation?", "plan qwen3-8b", ("Qwen/Qwen3-8B", weighs(16.38))),
    Question(
        "A 4090 and Qwen3-30B-A3B: how fast?",
        f"plan Qwen/Qwen3-30B-A3B --machine 4090 {AUTO}",
        (holds(61.06), "tokens/s", "nominal", "host memory", "RTX 4090"),
    ),
    Question(
        "What do I fetch to be sure?",
        "plan Qwen/Qwen3-30B-A3B",
        ("published config", 'hf download Qwen/Qwen3-30B-A3B --include "*.json"'),
    ),
    Question(
        "Does gpt-oss-20b fit 16 GB?",
        f"plan openai/gpt-oss-20b --machine 4080 {AUTO}", (holds(13.76), "nothing is offloaded")
    ),
    Question(
        "gpt-oss-120b on a 3090?", f"plan openai/gpt-oss-120b --machine 3090 {AUTO}", (holds(65.25), "tokens/s", "3090")
    ),
    Question(
        "A 70B in four bits on a 4090?",
        f"plan unsloth/Llama-3.3-70B-Instruct-bnb-4bit --machine 4090 {AUTO}",
        (holds(39.5), "tokens/s"),
    ),
    Question("The 70B in 16 bits?", "plan meta-llama/Llama-3.3-70B-Instruct", (weighs(141.1),)),
    Question(
        "Qwen3-235B-A22B beside 128 GiB of host memory?",
        f"plan Qwen/Qwen3-235B-A22B --machine 5090 {AUTO} --host-memory 120GiB",
        (holds(470.2), "the rest in files", "tokens/s"),
    ),
    Question("GLM-4.5-Air on 32 GB?", f"plan zai-org/GLM-4.5-Air --machine 5090 {AUTO}", (holds(213.7), "tokens/s")),
    Question("DeepSeek-V3?", "plan deepseek-ai/DeepSeek-V3", (weighs(672.6),)),
    Question("FLUX.1-dev?", "plan black-forest-labs/FLUX.1-dev", (weighs(33.7), "diffusers")),
    Question("Wan2.2 for video?", "plan Wan-AI/Wan2.2-T2V-A14B-Diffusers", (weighs(69.0), "diffusers")),
    Question(
        "I misspelt it", "plan Qwen/Qwen3-30B-A3", ("Qwen/Qwen3-30B-A3B", "hf download Qwen/Qwen3-30B-A3"), exit_code=2
    ),
    Question(
        "A model nobody knows by name",
        "plan somebody/unheard-of-7b",
        ('hf download somebody/unheard-of-7b --include "*.json"',),
        exit_code=2,
    ),
    Question(
        "Run it without files",
        "generate Qwen/Qwen3-8B --prompt Hi",
        ("hf download Qwen/Qwen3-8B`", "headrace plan Qwen/Qwen3-8B"),
        exit_code=2,
    ),
    Question(
        "Run it, without its organisation",
        "generate qwen3-8b --prompt Hi",
        ("hf download Qwen/Qwen3-8B`",),
        exit_code=2,
        never=("hf download qwen3-8b",),
    ),
    # -- a config alone
    Question(
        "Only a config.json",
        f"plan FOLDER --machine 4090 {AUTO}",
        (holds(61.06), "config.json alone", "tokens/s"),
        QWEN3_30B_A3B,
    ),
    Question("The file itself", "plan FOLDER/config.json", (weighs(16.38),), QWEN3_8B),
    Question("As JSON", "plan FOLDER --device-memory 4GiB --machine 4090 --json", ('"least_budget_bytes"',), QWEN3_8B),
    Question("NF4", "plan FOLDER", (weighs(6.40),), quantised(QWEN3_8B, **NF4)),
    Question("NF4, scales quantised too", "plan FOLDER", (weighs(6.07),), quantised(QWEN3_8B, **DOUBLE)),
    Question("fp8 in blocks", "plan FOLDER", (weighs(9.44),), quantised(QWEN3_8B, **FP8)),
    Question(
        "GPTQ", "plan FOLDER", (weighs(6.10),), quantised(QWEN3_8B, quant_method="gptq", bits=4, group_size=128)
    ),
    Question("AWQ", "plan FOLDER", (weighs(6.10),), quantised(QWEN3_8B, quant_method="awq", bits=4, group_size=128)),
    Question(
        "A format that has no rule",
        "plan FOLDER",
        ("hqq", "bitsandbytes", "headers"),
        quantised(QWEN3_8B, quant_method="hqq"),
        exit_code=2,
    ),
    # -- cards
    Question("As the shop writes it", f"plan Qwen/Qwen3-8B --machine 'RTX 4060 Ti' {AUTO}", ("RTX 4060 Ti", "nominal")),
    Question("12 GB", f"plan Qwen/Qwen3-8B --machine 3060 {AUTO}", ("RTX 3060", "tokens/s")),
    Question("A rented card", f"plan Qwen/Qwen3-235B-A22B --machine b200 {AUTO}", ("NVIDIA B200", "tokens/s")),
    Question("An older board", f"plan Qwen/Qwen3-32B --machine 4090 --link pcie3 {AUTO}", ("pcie3", "tokens/s")),
    Question("A typo", f"plan Qwen/Qwen3-8B --machine 4091 {AUTO}", ("4091", "nearest", "4090"), exit_code=2),
    Question(
        "A link that is none", f"plan Qwen/Qwen3-8B --machine 4090 --link usb {AUTO}", ("--link", "pcie4"), exit_code=2
    ),
    Question("A link of nothing", "plan Qwen/Qwen3-8B --link pcie4", ("--link", "--machine"), exit_code=2),
    Question("A link that was measured", "plan Qwen/Qwen3-8B --machine h200 --link pcie4", ("measured",), exit_code=2),
    # -- budgets, and usage
    Question("Without a GPU, auto", "plan TINY --device-memory auto", ("auto", "--machine"), exit_code=2),
    Question("A size that is none", "plan TINY --device-memory lots", ("'lots'", "auto"), exit_code=2),
    Question(
        "A flag that is none", "plan TINY --device-memroy 1MB", ("error: ", "--device-memory", "plan -h"), exit_code=2,
        never=("Usage", "╭"),
    ),
    Question("No model", "plan", ("error: ", "MODEL", "plan -h"), exit_code=2, never=("Usage", "╭")),
    Question("A verb that is none", "plam", ("error: ", "plan", "headrace -h"), exit_code=2, never=("Usage", "╭")),
    Question("Can the shell complete it?", "--help", ("--install-completion",)),
    # -- a chat
    Question(
        "A chat from a pipe",
        "chat CHATTY --max-new-tokens 4 --device cpu",
        ("tokens/s",),
        stdin="Water is\nand fire is\n",
    ),
    Question(
        "And it ends",
        "chat CHATTY --max-new-tokens 4 --device cpu",
        ("weights: device memory",),
        stdin="/exit\nnever said\n",
        never=("first token",),
    ),
    Question("A prompt from a pipe", "generate TINY --prompt - --max-new-tokens 2", ("2 tokens",), stdin="Water is"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("question", QUESTIONS, ids=[question.asks for question in QUESTIONS])
def test_an_answer(question: Question, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("COLUMNS", "200")
    folder = tmp_path / "folder"
    if question.config is not None:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(question.config))
    command = question.command.replace("FOLDER", str(folder)).replace("TINY", str(model))
    if "CHATTY" in command:
        template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        chatty = changed(model, tmp_path / "chatty", "tokenizer_config.json", chat_template=template)
        command = command.replace("CHATTY", str(chatty))
    done = run(*shlex.split(command), stdin=question.stdin)
    output = " ".join((done.stdout + done.stderr).split())
    assert done.exit_code == question.exit_code, output
    for fact in question.facts:
        assert fact.is_in(output) if isinstance(fact, Size) else fact in output, f"{fact} in: {output}"
    assert not [text for text in question.never if text in output], output


def test_they_are_forty() -> None:
    assert len({question.asks for question in QUESTIONS}) >= 40


def test_the_hub_cache_with_a_config_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `hf download NAME --include "*.json"` leaves it: an index of files that are not there, too."""
    hub, commit = tmp_path / "hub", "1a2b" * 10
    snapshot = hub / "models--me--mine" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (hub / "models--me--mine" / "refs").mkdir()
    (hub / "models--me--mine" / "refs" / "main").write_text(commit)
    (snapshot / "config.json").write_text(json.dumps(QWEN3_8B))
    index = {
        "metadata": {"total_size": 16381470720},
        "weight_map": {"lm_head.weight": "model-00001-of-00005.safetensors"},
    }
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    done = run("plan", "me/mine")
    assert done.exit_code == 0, done.output
    assert weighs(16.38).is_in(" ".join(done.stdout.split()))
    assert "config.json alone" in done.stderr
