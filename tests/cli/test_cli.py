"""The promise: the command line says what will happen before it happens, in flags that stay, and fails in one line.

The demo's parts are in test_demo.py.
"""

from __future__ import annotations

import ast
import fcntl
import importlib.metadata
import json
import logging
import math
import os
import pty
import re
import shutil
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
)

import headrace
from checks import raising
from commands import OFFLOAD_FLAGS, TINY, changed, error_of, plain_text, run, succeed, tiny_model
from headrace.checkpoint.safetensors_header import read_json
from headrace.cli import app, terminal
from headrace.cli.arguments import VERB_FLAGS, requested, target_device
from headrace.cli.demo_run import ensure_model
from headrace.cli.terminal import expand_lists
from headrace.config import RANK_MODES, SHARDED_MODES, UVA, VARIABLES, Budget, Mode, Prefetch, Rules, Workload
from headrace.errors import CheckpointError, HeadraceError, HeadraceWarning, OptionError
from headrace.flags import COMMAND_LINE, EXCLUDES, OffloadFlags, engine_surface, flag_of
from headrace.formatting import format_size
from headrace.stores.file_reads import DiskOptions, File
from headrace.transfer.machine_probe import Probe

model = tiny_model
ROOT = Path(__file__).parents[2]

GUESSES = ["--speculate", "--guesses", "--accepted", "--accepted-from"]
FLAGS = {
    "demo": ["--folder", "--keep", "-v", "--verbose"],
    "plan": [
        *GUESSES, "--json", "--save", "--machine", "--link", "--host-bandwidth", "--dtype", "--expert-trace",
        "--height", "--width", "--frames", "--tiling", "--steps", "--num-ranks", *OFFLOAD_FLAGS, "-v", "--verbose",
    ],
    "generate": [
        "--prompt", "--chat", "--no-chat", *GUESSES, "--system", "--max-new-tokens", "--temperature", "--top-p",
        "--top-k", "--seed", "--prefill-chunk-size", "--dtype", "--attn-implementation", "--experts-implementation",
        "--cpu-experts", "--use-liger-kernel", "--no-graphs", "--download", "--quiet", "--trace", "--expert-trace",
        "--acceptance", *OFFLOAD_FLAGS, "-v", "--verbose",
    ],
    "chat": [
        *GUESSES, "--system", "--max-new-tokens", "--temperature", "--top-p", "--top-k", "--seed",
        "--prefill-chunk-size", "--dtype", "--attn-implementation", "--experts-implementation", "--cpu-experts",
        "--use-liger-kernel", "--no-graphs", "--download", "--quiet", "--trace", "--expert-trace", "--acceptance",
        *OFFLOAD_FLAGS, "-v", "--verbose",
    ],
    "serve": [
        *GUESSES, "--engine", "--host", "--port", "--api-key", "--served-model-name", "--max-queue", "--switch-after",
        "--cors", "--allowed-hosts", "--generation-config", "--dtype", "--experts-implementation", "--cpu-experts",
        "--use-liger-kernel", "--additional-config", "--dry-run", *OFFLOAD_FLAGS,
        "--measure-stalls",
    ],
}  # fmt: skip


def before_prediction(text: str) -> str:
    """The plan itself, without predictions and alternatives."""
    return text.partition("Predicted steps")[0]


# -- flags -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", FLAGS)
def test_the_flags_of_a_verb_are_frozen(verb: str) -> None:
    command = typer.main.get_command(app).commands[verb]  # type: ignore[attr-defined]
    flags = [opt for param in command.params for opt in (*param.opts, *param.secondary_opts) if opt.startswith("-")]
    assert flags == FLAGS[verb]


def test_the_table_names_its_own_flags() -> None:
    """And says why flags contradict one another; every flag of a verb comes from it."""
    rows = {row.name for row in fields(OffloadFlags)}
    assert all({flag, *others} <= rows and why for flag, (others, why) in EXCLUDES.items())
    for surface in (COMMAND_LINE, engine_surface("vLLM")):
        assert all({flag, *needs} <= rows for flag, needs in surface.needs.items())
    assert [flag_of(name) for name in VERB_FLAGS] == OFFLOAD_FLAGS


@pytest.mark.parametrize("verb", ["", *FLAGS, "probe", "bench", "bench step"])
def test_help(verb: str) -> None:
    for flag in ("--help", "-h"):
        result = succeed(*verb.split(), flag)
        assert f"Usage: headrace {verb}".rstrip() in result.stdout


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_version(flag: str) -> None:
    result = run(flag)
    assert (result.exit_code, result.stdout) == (0, f"headrace {headrace.__version__}\n")


@pytest.mark.parametrize(("command", "message"), [
    ("plan --nonsense", "No such option: --nonsense; `headrace plan -h` lists what there is"),
    ("generate m", "Missing option '--prompt'; `headrace generate -h`"),
    ("plan m --num-ranks x", "Invalid value for '--num-ranks'"),
    ("plam", "No such command 'plam'. Did you mean 'plan'?; `headrace -h`"),
    ("--nonsense", "No such option: --nonsense; `headrace -h`"),
    ("bench nothing", "No such command 'nothing'; `headrace bench -h`"),
    ("plan m --offload-params", "--offload-params needs at least one name after it"),
])  # fmt: skip
def test_a_usage_error_is_one_line_too(command: str, message: str) -> None:
    assert message in error_of(*command.split())


@pytest.mark.slow
def test_the_shell_completes() -> None:
    asked = {"_HEADRACE_COMPLETE": "complete_bash", "COMP_WORDS": "headrace plan --lin", "COMP_CWORD": "2"}
    command = [sys.executable, "-m", "headrace"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **asked})
    assert done.stdout.split() == ["--link"]


@pytest.mark.parametrize("width", ["80", "0", None])
def test_columns_hold_in_a_pipe(width: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them, or with 0, for which nothing was printed, it is wide enough for the tables of a plan."""
    if width is not None:
        monkeypatch.setenv("COLUMNS", width)
    code = "from headrace.cli.terminal import stderr, stdout; print(stdout.width, stderr.width)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["80" if width == "80" else "120"] * 2


@pytest.mark.slow
def test_the_command_line_starts_without_torch() -> None:
    # The package itself imports torch, so an empty stand-in takes its place: what is left is what the CLI adds.
    code = """
import sys, types
from dataclasses import replace
from pathlib import Path
package = types.ModuleType("headrace")
package.__path__ = [sys.argv[1]]
sys.modules["headrace"] = package
from headrace.cli import app
try:
    app(["plan", "--help"])
except SystemExit as end:
    assert end.code == 0
heavy = {"torch", "transformers", "numpy", "matplotlib"} & sys.modules.keys()
sys.exit(f"imported {heavy}" if heavy else 0)
"""
    package = str(Path(sys.modules["headrace"].__file__ or "").parent)
    done = subprocess.run([sys.executable, "-c", code, package], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("given", "expanded"), [
    ("plan M --offload-params a b c", "plan M --offload-params a --offload-params b --offload-params c"),
    ("plan --offload-params a b -- M", "plan --offload-params a --offload-params b -- M"),
    ("plan --offload-params a --json M", "plan --offload-params a --json M"),
    ("plan M --offload-params a --offload-params b", "plan M --offload-params a --offload-params b"),
    ("plan --cpu-offload-params a b --offload-params c", "plan --cpu-offload-params a --cpu-offload-params b "
     "--offload-params c"),
    ("plan --offload-params=a M", "plan --offload-params=a M"),
    ("plan M --offload-rule a=uva re:b=c=uva", "plan M --offload-rule a=uva --offload-rule re:b=c=uva"),
    ("plan -- M --offload-params a b", "plan -- M --offload-params a b"),
    ("plan M", "plan M"),
    ("", ""),
])  # fmt: skip
def test_a_list_after_one_flag_becomes_repeated_flags(given: str, expanded: str) -> None:
    assert expand_lists(given.split()) == expanded.split()


@pytest.mark.parametrize(
    "args", [["--offload-params"], ["--offload-params", "--json"], ["--offload-params", "--", "M"]]
)
def test_a_list_flag_without_names_does_not_swallow_the_next_flag(args: Sequence[str]) -> None:
    result = run("plan", *args)
    assert result.exit_code == 2
    assert "needs at least one name" in " ".join(result.stderr.split())


@pytest.mark.parametrize(("flags", "policy"), [
    ({}, None),
    ({"offload_backend": "none"}, None),
    ({"cpu_offload_gb": 0.0, "offload_group_size": 0}, None),
    ({"device_memory": "20GiB"}, Budget("20GiB")),
    ({"device_memory": "20GiB", "offload_backend": "auto"}, Budget("20GiB")),
    ({"device_memory": "1GiB", "offload_params": ["mlp"], "offload_mode": "cpu"}, Budget("1GiB", ["mlp"], "cpu")),
    (
        {"device_memory": "1GiB", "batch": "1, 16,16", "context": 4096, "host_memory": "2GiB"},
        Budget("1GiB", workload=Workload([1, 16], 4096), host_memory="2GiB"),
    ),
    ({"offload_group_size": 4}, Prefetch(4, 1, 1, mode="disk")),
    (
        {"offload_group_size": 4, "offload_num_in_group": 2, "offload_prefetch_step": 3, "offload_params": ["a"]},
        Prefetch(4, 2, 3, ["a"], "disk"),
    ),
    ({"offload_group_size": 1, "offload_mode": "cpu"}, Prefetch(mode="cpu")),
    ({"cpu_offload_gb": 1.5}, UVA(int(1.5 * 2**30), mode="disk")),
    ({"cpu_offload_params": ["experts"]}, UVA(None, ["experts"], "disk")),
    ({"offload_rule": ["re:a=b=uva", "@mlp=prefetch"]}, Rules([("re:a=b", "uva"), ("@mlp", "prefetch")], 2, "disk")),
    (
        {"offload_rule": ["a=prefetch"], "offload_prefetch_step": 3, "offload_mode": "cpu"},
        Rules([("a", "prefetch")], 3),
    ),
    (
        {"device_memory": "1GiB", "offload_rule": ["a=uva", "b=resident"]},
        Budget("1GiB", rules=[("a", "uva"), ("b", "resident")]),
    ),
])  # fmt: skip
def test_flags_become_a_policy(flags: dict[str, Any], policy: object) -> None:
    assert requested(OffloadFlags(**flags), target_device(flags.get("device"))) == policy


@pytest.mark.parametrize(("flags", "message"), [
    ({"device_memory": "1GiB", "offload_group_size": 4}, "--device-memory and --offload-group-size contradict"),
    ({"device_memory": "1GiB", "offload_num_in_group": 4}, "--offload-num-in-group contradict"),
    ({"device_memory": "1GiB", "cpu_offload_gb": 4.0}, "--device-memory and --cpu-offload-gb contradict"),
    ({"device_memory": "1GiB", "offload_backend": "uva"}, "--device-memory and --offload-backend contradict"),
    ({"device_memory": "lots"}, "--device-memory: size 'lots' is not a size; write it like"),
    ({"device_memory": "3MiB", "host_memory": "lots"}, "--host-memory: size 'lots' is not a size; write it like"),
    *(
        ({"cpu_offload_gb": wrong}, f"--cpu-offload-gb {wrong:g}: expected a number of GiB, at least one byte")
        for wrong in (-1.0, 1e-10, math.nan, math.inf, 1e308)
    ),
    *(
        (
            {"device_memory": "1GiB", "batch": wrong},
            f"--batch {wrong!r}: expected numbers of rows, each at least 1, such as --batch 1,16,256",
        )
        for wrong in ("", "0", "x", "-1", "1,", "1;2", "1.5", "²")
    ),
    ({"device_memory": "1GiB", "context": -1}, "--context = -1: expected at least 0"),
    ({"batch": "1"}, "--batch has no effect without --device-memory"),
    ({"context": 0}, "--context has no effect without --device-memory"),
    ({"host_memory": "1GiB", "offload_group_size": 2}, "--host-memory has no effect without --device-memory"),
    *(
        ({"offload_rule": ["a=uva"], flag: value}, "has no effect without --device-memory")
        for flag, value in (("batch", "4"), ("context", 8), ("host_memory", "1GiB"))
    ),
    ({"device_memory": "1GiB", "host_memory": "0"}, "expected more than 0 bytes"),
    ({"offload_backend": "fast"}, "expected one of auto, prefetch, uva, none"),
    ({"offload_backend": "prefetch"}, "needs --offload-group-size"),
    ({"offload_backend": "uva", "offload_group_size": 2}, "needs --cpu-offload-gb"),
    ({"offload_group_size": 2, "cpu_offload_gb": 1.0}, "--offload-group-size and --cpu-offload-gb contradict"),
    (
        {"offload_group_size": 2, "offload_mode": "tape"},
        "--offload-mode 'tape': expected one of cpu, shm_cpu, sharded_cpu, disk, sharded_gpu, meta",
    ),
    ({"offload_group_size": 2, "offload_num_in_group": 3}, "larger than group_size"),
    ({"offload_num_in_group": 2}, "--offload-num-in-group has no effect without --offload-group-size"),
    ({"offload_params": ["mlp"]}, "--offload-params has no effect without"),
    ({"offload_rule": ["mlp"]}, "--offload-rule 'mlp': expected a name pattern, '=' and a mechanism; write PATTERN="),
    (
        {"device_memory": "1GiB", "offload_rule": ["mlp=cpu"]},
        "--offload-rule 'mlp=cpu': expected a name pattern, '=' and a mechanism, found 'cpu'; write PATTERN=",
    ),
    ({"offload_rule": ["a=uva"], "offload_group_size": 2}, "--offload-rule and --offload-group-size contradict"),
    ({"offload_rule": ["a=uva"], "cpu_offload_gb": 2.0}, "--offload-rule and --cpu-offload-gb contradict"),
    ({"offload_rule": ["a=uva"], "offload_backend": "none"}, "--offload-rule and --offload-backend contradict"),
    ({"offload_rule": ["a=uva"], "offload_params": ["b"]}, "--offload-params has no effect without"),
    ({"offload_rule": ["a=uva"], "offload_prefetch_step": 2}, "has no effect without a rule that says prefetch"),
    (
        {"device_memory": "1GiB", "offload_rule": ["a=prefetch"], "offload_prefetch_step": 2},
        "--device-memory and --offload-prefetch-step contradict",
    ),
    ({"offload_mode": "disk"}, "--offload-mode has no effect without --device-memory, --offload-group-size, --cpu-off"),
    (
        {"offload_backend": "prefetch", "offload_group_size": 2, "cpu_offload_gb": 1.0},
        "--offload-group-size and --cpu-offload-gb contradict each other: each says what is offloaded",
    ),
    (
        {"offload_backend": "prefetch", "offload_group_size": 2, "cpu_offload_params": ["mlp"]},
        "--offload-group-size and --cpu-offload-params contradict each other",
    ),
    (
        {"offload_backend": "none", "offload_group_size": 2},
        "--offload-group-size has no effect with --offload-backend none; leave one of the two out",
    ),
])  # fmt: skip
def test_contradictions_and_flags_without_effect_are_errors(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as caught:
        requested(OffloadFlags(**flags), target_device(flags.get("device")))
    assert message in str(caught.value)


# -- plan --------------------------------------------------------------------------------------------------------------


def test_plan_prints_a_table(model: Path) -> None:
    result = succeed("plan", model, "--device-memory", "2MiB")
    for text in (
        "device memory", "moved per forward", "slots", "read in place", "model.layers.*", "down_proj", "tokens/s",
    ):  # fmt: skip
        assert text in result.stdout


def test_plan_json_is_the_plan_and_nothing_else(model: Path) -> None:
    result = succeed("plan", model, "--json", "--offload-group-size", "2", "--offload-params", "mlp", "q_proj")
    plan = json.loads(result.stdout)
    assert [unit["module_fqn"] for unit in plan["units"]] == ["model.layers.1", "model.layers.3"]
    assert {entry["storage"].split(".")[-2] for entry in plan["units"][0]["entries"]} == {
        "gate_proj", "up_proj", "down_proj", "q_proj",
    }  # fmt: skip
    assert plan["mode"] == "disk"


def test_plan_by_rules(model: Path) -> None:
    result = succeed(
        "plan", model, "--json", "--offload-rule", "layers.0=resident", "@attention=prefetch", "embeddings=uva"
    )
    plan = json.loads(result.stdout)
    assert [unit["module_fqn"] for unit in plan["units"]] == [f"model.layers.{index}" for index in (1, 2, 3)]
    assert all(".self_attn." in entry["storage"] for unit in plan["units"] for entry in unit["entries"])
    assert list(plan["uva"]) == ["model.embed_tokens.weight"]


def test_rules_without_sense_fail_in_one_line(model: Path) -> None:
    assert "contradict each other" in error_of("plan", model, "--offload-rule", "mlp=uva", "mlp=prefetch")
    assert "write PATTERN=MECHANISM" in error_of("plan", model, "--offload-rule", "mlp")
    message = error_of("plan", model, "--device-memory", "2MiB", "--offload-rule", "@vision=uva")
    assert "has the groups @attention, @mlp, @embeddings, @lm_head" in message


@pytest.mark.slow
def test_the_first_plan_of_a_folder_ends_without_noise(model: Path, tmp_path: Path) -> None:
    """As a process of its own: Triton's bindings printed at its end that they leak."""
    command = [sys.executable, "-m", "headrace", "plan", str(model), "--device-memory", "2MiB"]
    package = str(Path(headrace.__file__).parent.parent)
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": package}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    assert "Predicted steps" in done.stdout
    assert "leaked" not in done.stderr
    assert "nanobind" not in done.stderr


def test_plan_without_flags_says_the_weight_and_a_minimum_that_holds(model: Path) -> None:
    result = succeed("plan", model)
    assert "weighs" in result.stdout
    exact = int(error_of("plan", model, "--device-memory", "1B").split("iB (")[-1].split(" bytes")[0])
    assert f"--device-memory {-(-exact // 2**20)}MiB ({format_size(exact)})" in result.stdout
    assert run("plan", model, "--device-memory", f"{exact}B").exit_code == 0
    assert "too small" in error_of("plan", model, "--device-memory", f"{exact - 1}B")


@pytest.mark.slow
def test_plan_reads_headers_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of 63 GiB whose weights are one hole in a sparse file: there is nothing to read."""
    num_bytes = write_sparse_model(tmp_path)
    assert num_bytes > 60 * 2**30
    reads: list[int] = []
    preadv = os.preadv

    def counting(fd: int, buffers: Sequence[Any], offset: int) -> int:
        reads.append(offset + sum(map(len, buffers)))
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", counting)
    result = run("plan", tmp_path, "--device-memory", "20GiB", "--json")
    assert result.exit_code in (0, 1), result.output  # 1: more than the machine of the test has
    plan = json.loads(result.stdout)
    assert plan["device_bytes"] <= 20 * 2**30
    buffers = sum(num_bytes for name, num_bytes in plan["resident"].items() if name.endswith("inv_freq"))
    assert sum(plan["resident"].values()) + plan["prefetched_bytes"] + plan["uva_bytes"] == num_bytes + buffers
    assert max(reads) <= 128 * 1024


def write_sparse_model(folder: Path) -> int:
    """A Qwen3 of 32B parameters in one file without data; returns the bytes of its tensors."""
    config = Qwen3Config(
        hidden_size=5120, intermediate_size=25600, num_hidden_layers=64, num_attention_heads=64, num_key_value_heads=8,
        head_dim=128, dtype="bfloat16", architectures=["Qwen3ForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    header: dict[str, Any] = {}
    end = 0
    for name, parameter in model.named_parameters():
        begin, end = end, end + 2 * parameter.numel()
        header[name] = {"dtype": "BF16", "shape": list(parameter.shape), "data_offsets": [begin, end]}
    raw = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + end)
    return end


@pytest.mark.slow
def test_plan_counts_the_workload(model: Path) -> None:
    def minimum(*flags: object) -> int:
        return int(error_of("plan", model, "--device-memory", "1B", *flags).split("iB (")[-1].split(" bytes")[0])

    bare = minimum()
    per_token = 2 * TINY.layers * TINY.key_value_heads * (TINY.hidden // TINY.heads) * 2
    assert minimum("--context", 100) > bare + 100 * per_token
    one, many = minimum("--context", 64) - bare, minimum("--context", 64, "--batch", "1,8") - bare
    assert many == 8 * one
    assert run("plan", model, "--device-memory", f"{bare + many}B", "--context", 64, "--batch", 8).exit_code == 0
    limit = TINY.build().config.max_position_embeddings
    message = error_of("plan", model, "--device-memory", "4MiB", "--context", limit + 1)
    assert f"{limit + 1} tokens is longer than the {limit} " in message
    assert f"--context {limit} or less" in message


def test_plan_warnings_are_lines_on_stderr(model: Path) -> None:
    result = succeed("plan", model, "--device-memory", "1GiB", "--json")
    json.loads(result.stdout)
    assert "warning: the weights" in result.stderr
    assert "HeadraceWarning" not in result.stderr


def test_plan_tries_how_the_files_would_be_opened(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []
    real = os.open

    def recording(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        opened.append(flags)
        return real(path, flags & ~os.O_DIRECT, *args, **kwargs)

    monkeypatch.setattr(os, "open", recording)
    assert run("plan", model, "--device-memory", "2MiB", "--disk-direct").exit_code == 0
    assert any(flags & os.O_DIRECT for flags in opened)


@pytest.mark.slow
def test_a_saved_plan_is_shown_and_carried_out(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    made = succeed("plan", model, "--device-memory", "2MiB", "--save", file)
    assert f"plan saved in {file}" in made.stderr
    data = json.loads(file.read_text())
    assert (data["model"]["name"], data["machine"]) == (model.name, {"device": "cpu", "device_bytes": None})
    shown = run("plan", model, "--plan", file)
    assert (shown.exit_code, before_prediction(shown.stdout)) == (0, before_prediction(made.stdout))
    shown_data = json.loads(run("plan", model, "--plan", file, "--json").stdout)
    assert shown_data.pop("prediction")["steps"][0]["rows"] == 1
    assert shown_data == data
    args = ("generate", model, "--prompt", "Water", "--max-new-tokens", 4)
    by_plan, by_policy = run(*args, "--plan", file), run(*args, "--device-memory", "2MiB")
    assert by_plan.exit_code == 0, by_plan.output
    assert by_plan.stdout == by_policy.stdout
    moved = [re.search(r"^(\d+\.\d+ [KMG]iB moved) ", result.stderr, re.M) for result in (by_plan, by_policy)]
    assert moved[0]
    assert moved[1]
    assert moved[0][1] == moved[1][1]


@pytest.mark.slow
def test_a_plan_says_what_it_will_cost(model: Path, tmp_path: Path) -> None:
    args = ("plan", model, "--device-memory", "3200KiB", "--batch", "1,4", "--context", "64")
    text = succeed(*args)
    for part in (
        "Predicted steps", "bound by", "KV cache", "; run `headrace probe` on that machine", "KiB of activations",
    ):  # fmt: skip
        assert part in text.stdout
    prediction = json.loads(run(*args, "--json").stdout)["prediction"]
    assert [step["rows"] for step in prediction["steps"]] == [1, 4]
    for step, memory in zip(prediction["steps"], prediction["memory"], strict=True):
        assert step["step_s"] >= step["floor_s"] > 0
        assert memory["cache_bytes"] == step["rows"] * 64 * 4 * 2 * 2 * 32 * 4  # layers, k and v, heads, width, float32
        assert memory["device_bytes"] <= 3200 * 1024
    assert prediction["is_measured"] is False


def test_more_memory_and_larger_batches_are_offered(model: Path) -> None:
    stdout = run("plan", model, "--device-memory", "2MiB").stdout
    assert re.search(r"1 GiB more device memory: \d+\.\dx faster \(all weights at hand", stdout)
    assert re.search(r"batch \d+ instead of 1: [\d.]+x the tokens for \d+% more step time", stdout)


@pytest.mark.parametrize(("verb", "is_rare"), [("plan", True), ("generate", False)])
def test_garbage_is_collected_rarely_where_no_model_runs(verb: str, is_rare: bool) -> None:
    """Collections while torch and transformers are imported would take a quarter of the time of a plan."""
    code = "import gc, sys, headrace.cli as cli\ncli.app = lambda **_: print(gc.get_threshold()[0])\ncli.main()"
    done = subprocess.run([sys.executable, "-c", code, verb], capture_output=True, text=True, check=True)
    assert (int(done.stdout) > 10_000) == is_rare


def test_planning_with_files_read_past_the_page_cache(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As this machine's kept probe has it, and as the same probe in a file has it."""
    kept = Probe({"cpu": "x86"}, product_s_per_byte={1: 1e-12}, disk_read_bytes_per_s=1e8, cached_read_bytes_per_s=1e10)
    monkeypatch.setattr("headrace.transfer.machine_probe.load", lambda: kept)
    args = ("plan", model, "--device-memory", "2MiB", "--json")
    predictions = [json.loads(run(*args, *flag).stdout)["prediction"] for flag in ((), ("--disk-direct",))]
    through, past = (prediction["steps"][0]["step_s"] for prediction in predictions)
    assert past > 10 * through


def test_planning_for_another_machine(model: Path, tmp_path: Path) -> None:
    """A probe from a machine with a GPU: rates, zero-copy, the store and the refusal here all follow from it."""
    rate, seconds = {"1048576": 50e9}, {"1": 3e-13, "256": 4e-13}
    probe = {
        "schema": 3,
        "machine": {"devices": "A GPU, A GPU", "device_bytes": str(2**34), "cpu": "x86", "torch": "2.11"},
        "h2d_bytes_per_s": rate, "device_copy_bytes_per_s": 4e12, "kernel_s": 1e-6, "disk_read_bytes_per_s": 3e9,
        "product_s_per_byte": seconds, "grouped_s_per_byte": seconds, "in_place_s_per_byte": seconds,
        "in_place_grouped_s_per_byte": seconds, "cached_read_bytes_per_s": 5e10,
    }  # fmt: skip
    file, plan = tmp_path / "probe.json", tmp_path / "plan.json"
    file.write_text(json.dumps(probe))
    args = ("plan", model, "--device-memory", "2MiB", "--machine", file)
    data = json.loads(run(*args, "--json", "--save", plan).stdout)
    assert (data["mode"], data["machine"]) == ("cpu", {"device": "A GPU", "device_bytes": 2**34})
    assert (data["prediction"]["machine"], data["prediction"]["is_measured"]) == ("A GPU, A GPU", True)
    assert "A GPU" in error_of("generate", model, "--prompt", "Water", "--plan", plan)
    assert "--machine and --device contradict" in error_of(*args, "--device", "cpu")
    file.write_text('{"schema": 1}')
    assert "run it again on that machine" in error_of(*args)
    for key in ("devices", "cpu"):
        rates = {"kernel_s": probe["kernel_s"]} if key == "cpu" else probe
        file.write_text(json.dumps({"schema": 3, **rates, "machine": {}}))
        assert f"found: no key '{key}'; run it again" in error_of(*args)
    file.unlink()
    assert "headrace probe --json" in error_of(*args)


def test_planning_for_the_machine_of_a_published_probe(model: Path) -> None:
    """It is from before probes said how much memory the GPU has."""
    report = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "2026-11-21-plan-h200-probe.json"
    data = json.loads(run("plan", model, "--device-memory", "2MiB", "--machine", report, "--json").stdout)
    assert data["machine"] == {"device": "NVIDIA H200", "device_bytes": None}


@pytest.mark.parametrize("device", ["tape", "cuda:99", "mps", ""])
def test_a_device_that_is_not_there(model: Path, device: str) -> None:
    assert f"--device {device!r}" in error_of("plan", model, "--device-memory", "2MiB", "--device", device)


def test_a_plan_of_another_model_is_refused(model: Path, tmp_path: Path) -> None:
    ensure_model(tmp_path / "other", replace(TINY, layers=5))
    file = tmp_path / "plan.json"
    assert run("plan", tmp_path / "other", "--device-memory", "2MiB", "--save", file).exit_code == 0
    for verb in (("plan", model), ("generate", model, "--prompt", "a")):
        message = error_of(*verb, "--plan", file)
        assert "made for another model (other): " in message
        assert "in the plan alone" in message


def test_what_contradicts_a_plan_and_places_for_none(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    assert run("plan", model, "--device-memory", "2MiB", "--save", file).exit_code == 0
    for flag, value in (
        ("--device-memory", "1MiB"), ("--offload-backend", "uva"), ("--cpu-offload-gb", 1), ("--offload-mode", "cpu"),
        ("--cpu-offload-params", "mlp"), ("--offload-group-size", 2), ("--offload-num-in-group", 1),
        ("--offload-prefetch-step", 1), ("--offload-params", "mlp"),
    ):  # fmt: skip
        assert f"--plan and {flag} contradict each other" in error_of("plan", model, "--plan", file, flag, value)
    assert run("plan", model, "--plan", file, "--disk-drop-cache", "--offload-backend", "auto").exit_code == 0
    for flag in ("--disk-direct", "--disk-drop-cache"):
        assert f"{flag} has no effect without a plan: nothing would be offloaded" in error_of("plan", model, flag)
    assert "found: No such file" in error_of("plan", model, "--plan", tmp_path / "none.json")
    assert "--save has no effect" in error_of("plan", model, "--save", file)
    nowhere = tmp_path / "no" / "plan.json"
    (tmp_path / "config.json").write_text("not JSON: --save is refused before it is read")
    assert "--save" in error_of("plan", tmp_path, "--device-memory", "2MiB", "--save", nowhere)


# -- generate ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("flags", [
    ["--device-memory", "2MiB"],
    ["--offload-group-size", "2", "--offload-mode", "cpu"],
    ["--cpu-offload-gb", "0.001", "--offload-mode", "cpu"],
    [],
])  # fmt: skip
def test_generate_prints_what_transformers_prints(model: Path, flags: list[str]) -> None:
    result = succeed("generate", model, "--prompt", "Water", "--max-new-tokens", 12, *flags)
    assert result.stdout == plain_text(model, "Water", max_new_tokens=12)
    speed = r"^12 tokens: first token [\d.]+ m?s, third step [\d.]+ m?s, then [\d.,]+ tokens/s$"
    assert re.search(speed, result.stderr, re.M)
    moved = re.search(r"^(\d+(?:\.\d+)?) M?i?B moved \(", result.stderr, re.M)
    assert moved
    assert (float(moved[1]) > 0) == (flags[:1] in (["--device-memory"], ["--offload-group-size"]))


def test_generate_samples_by_seed_and_reads_stdin(model: Path) -> None:
    args = ("generate", model, "--prompt", "-", "--max-new-tokens", 12, "--temperature", 1.5, "--seed", 3)
    result = succeed(*args, "--device-memory", "2MiB", stdin="Water")
    torch.manual_seed(3)
    assert result.stdout == plain_text(model, "Water", max_new_tokens=12, do_sample=True, temperature=1.5)


def test_generate_writes_a_trace(model: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    args = ("--prompt", "a", "--max-new-tokens", 2, "--device-memory", "2MiB", "--trace", trace)
    assert run("generate", model, *args).exit_code == 0
    kinds = {event.get("cat") for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"copy", "compute"} <= kinds


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_errors_are_one_line_with_exit_code_2(model: Path, tmp_path: Path) -> None:
    assert "no such folder" in error_of("plan", tmp_path / "nothing")
    assert "config.json" in error_of("plan", tmp_path)
    assert "a budget of 2.0 KiB (2000 bytes)" in error_of("plan", model, "--device-memory", "2 KB")
    for number in ("nan", "inf", "-1", "1e-10"):
        assert f"--cpu-offload-gb {number}: expected" in error_of("plan", model, "--cpu-offload-gb", number)
    assert "contradict" in error_of("plan", model, "--device-memory", "1MiB", "--offload-group-size", 2)
    assert "down_proj" in error_of("plan", model, "--device-memory", "1MiB", "--offload-params", "down_porj")
    generate = ("generate", model, "--prompt")
    assert "--seed has no effect" in error_of(*generate, "a", "--seed", 1)
    assert "--prompt is empty" in error_of(*generate, "")
    assert "--trace" in error_of(*generate, "a", "--trace", tmp_path / "no" / "folder.json")


@pytest.mark.parametrize("mode", RANK_MODES)
def test_generate_shares_memory_only_with_others(model: Path, mode: Mode, tmp_path: Path) -> None:
    """Found before the model is opened; and so it is for a plan in a file."""
    flags = ("--device-memory", "3MiB", "--offload-mode", mode)
    ranks = ("--num-ranks", 2) if mode in SHARDED_MODES else ()
    plan = tmp_path / "plan.json"
    assert run("plan", model, *flags, *ranks, "--save", plan).exit_code == 0
    for given in (flags, ("--plan", plan)):
        message = error_of("generate", model, "--prompt", "a", *given)
        assert f"mode {mode} (of --offload-mode, or of the plan in --plan)" in message
        assert "this one was started alone" in message
        assert "torchrun --nproc-per-node N -m headrace" in message


@pytest.mark.parametrize("mode", SHARDED_MODES)
def test_a_plan_says_over_how_many_ranks_units_are_split(model: Path, mode: Mode, tmp_path: Path) -> None:
    flags = ("--device-memory", "3MiB", "--offload-mode", mode)
    assert "give their number with --num-ranks N" in error_of("plan", model, *flags)
    assert "num_ranks = 0: expected at least 1" in error_of("plan", model, *flags, "--num-ranks", 0)
    for other in (("--device-memory", "3MiB"), ()):
        assert "in other modes no unit is split (--num-ranks)" in error_of("plan", model, *other, "--num-ranks", 2)
    file = tmp_path / "plan.json"
    result = run("plan", model, *flags, "--num-ranks", 2, "--save", file)
    assert "or start headrace generate with torchrun" in " ".join(result.stdout.split())
    saved = headrace.Plan.load(file)
    assert saved == headrace.make_plan(model, Budget("3MiB", mode=mode), num_ranks=2, device="cpu")
    assert (saved.mode, saved.num_ranks) == (mode, 2)
    for flag, num_ranks in (((), 2), (("--num-ranks", 4), 4)):
        shown = run("plan", model, "--plan", file, *flag, "--json")
        assert json.loads(shown.stdout)["num_ranks"] == num_ranks


@pytest.mark.parametrize("flags", [(), ("--device-memory", "2MiB"), ("--offload-group-size", "2")])
def test_how_files_are_read_counts_while_loading_too(
    model: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    """So these flags have an effect wherever weights are read, in any mode and with nothing offloaded."""
    seen: list[DiskOptions] = []
    real = File.__init__

    def recording(self: File, path: Path, options: DiskOptions, *args: Any, **kwargs: Any) -> None:
        seen.append(options)
        real(self, path, replace(options, direct=False), *args, **kwargs)

    monkeypatch.setattr(File, "__init__", recording)
    args = ("generate", model, "--prompt", "a", "--max-new-tokens", 1, "--offload-mode", "cpu")[: None if flags else -2]
    assert run(*args, *flags, "--disk-direct", "--disk-drop-cache").exit_code == 0
    assert seen
    assert set(seen) == {DiskOptions(direct=True, drop_cache=True)}


@pytest.mark.slow
def test_ranks_of_torchrun_generate_from_shared_memory(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torchrun = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in {**torchrun, "TORCHELASTIC_RUN_ID": "none"}.items():
        monkeypatch.setenv(name, str(value))
    flags = ("--device-memory", "2MiB", "--offload-mode", "shm_cpu")
    try:
        result = run("generate", model, "--prompt", "Water", "--max-new-tokens", 8, *flags)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    assert result.exit_code == 0, result.output
    assert "host, shared" in result.stderr
    assert result.stdout == plain_text(model, "Water", max_new_tokens=8)


@pytest.mark.slow
def test_generate_reads_every_token_of_a_prompt_without_a_mask(model: Path, tmp_path: Path) -> None:
    folder = changed(model, tmp_path / "model", "tokenizer_config.json", model_input_names=["input_ids"])
    prompt = "Wa!!ter"
    assert 0 in AutoTokenizer.from_pretrained(folder)(prompt).input_ids, "generate() would mask a padding id of 0"
    result = succeed("generate", folder, "--prompt", prompt, "--max-new-tokens", 12, "--device-memory", "2MiB")
    assert result.stdout == plain_text(folder, prompt, max_new_tokens=12)


def test_models_that_do_not_generate_are_refused(model: Path, tmp_path: Path) -> None:
    config = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, vocab_size=99)
    BertModel(config).save_pretrained(tmp_path)
    assert "headrace generate needs a causal language model" in error_of("generate", tmp_path, "--prompt", "a")
    assert "headrace chat needs a causal language model" in error_of("chat", tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / name, tmp_path)
    assert "headrace serve needs a causal language model" in error_of("serve", tmp_path)


@pytest.mark.parametrize("words", [("generate", "--prompt", "a"), ("serve", "--dry-run")])
def test_folders_without_a_tokenizer(tmp_path: Path, words: tuple[str, ...]) -> None:
    """transformers makes one of special tokens alone: Qwen's gives no tokens, and Gemma's the unknown one."""
    AutoModelForCausalLM.from_config(TINY.build().config).save_pretrained(tmp_path)
    for kind in ("Qwen2", "Gemma"):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": f"{kind}Tokenizer"}))
        assert "(tokenizer.json), found none: no token of text" in error_of(words[0], tmp_path, *words[1:])


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEADRACE_DEBUG", "1")
    assert isinstance(run("plan", tmp_path).exception, HeadraceError)
    monkeypatch.setenv("HEADRACE_DEBUG", "2")
    assert error_of("plan", tmp_path) == "error: HEADRACE_DEBUG='2': expected 0 or 1"


@pytest.mark.parametrize(("args", "message"), [
    (("step", "--device", "tpu"), "--device 'tpu': expected cpu, cuda or cuda:N"),
    (("step", "--device", "cuda:99"), "--device 'cuda:99': torch sees"),
    (("step", "--device", ""), "--device '': expected cpu, cuda or cuda:N"),
    *(
        (("step", "--device", "cpu", flag, value), f"{flag} has no effect with --device cpu, whose step is always")
        for flag, value in (("--rows", "77"), ("--variants", "zzz"), ("--layers", "36"))
    ),
    (("step", "--out", "/nonexistent/o.jsonl"), "--out '/nonexistent/o.jsonl': expected a file name in a folder"),
])  # fmt: skip
def test_benchmarks_refuse_before_they_begin(args: tuple[str, ...], message: str) -> None:
    assert message in error_of("bench", *args)


def test_a_probe_refuses_its_folder_before_it_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    for folder, found in (("/nonexistent", "found no such folder"), (file, "found something else")):
        result = run("probe", "--folder", folder)
        assert result.stderr.startswith(f"error: --folder '{folder}': expected a folder, {found}; make it, or leave")
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1)  # and no "measuring ..."
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)  # nothing is closed to root
    assert f"that user {os.geteuid()} may write to" in error_of("probe", "--folder", tmp_path)


def test_a_probe_that_cannot_be_kept_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a warning; the exit code is that of success, because what was asked for is there."""
    found = Probe(
        {"cpu": "x86"}, product_s_per_byte={1: 1e-12}, disk_read_bytes_per_s=1e8, cached_read_bytes_per_s=1e10
    )
    monkeypatch.setattr("headrace.transfer.measuring.measure", lambda folder: found)
    (tmp_path / "closed").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "closed"))
    for flags in ((), ("--json",)):
        result = succeed("probe", *flags)
        assert "the probe cannot be kept there" in result.stderr
        assert "set XDG_CACHE_HOME to another folder" in result.stderr
        assert "saved in" not in result.stderr
        assert "file read, direct" in result.stdout or json.loads(result.stdout)["disk_read_bytes_per_s"] == 1e8


# -- messages ----------------------------------------------------------------------------------------------------------


def test_misspelt_variables_are_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.config._reported", set())
    monkeypatch.setenv("HEADRACE_READER", "4")
    monkeypatch.setenv("headrace_debug", "1")
    monkeypatch.setenv("HEADRACE_READERS", "2")
    result = succeed("plan", model, "--device-memory", "2MiB")
    warned = [line for line in result.stderr.splitlines() if line.startswith("warning: the environment variable")]
    assert ["HEADRACE_READER has no effect" in warned[0], "headrace_debug has no effect" in warned[1]] == [True] * 2
    assert ["the nearest is HEADRACE_READERS" in warned[0], "the nearest is HEADRACE_DEBUG" in warned[1]] == [True] * 2
    assert len(warned) == 2
    monkeypatch.setattr("headrace.config._reported", set())
    with pytest.warns(HeadraceWarning, match="HEADRACE_READER has no effect") as caught:
        headrace.offload(TINY.build(), headrace.Prefetch()).remove()
    assert len(caught) == 2
    assert str(caught[0].filename) == __file__


def test_the_docs_name_all_variables() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "reference.md").read_text()
    for name, (default, meaning) in VARIABLES.items():
        assert f"| `{name}` | {default} | {meaning} |" in text
    assert set(re.findall(r"HEADRACE_[A-Z_]+", text)) == VARIABLES.keys()


def test_the_docs_name_all_flags() -> None:
    """Those of speculation were missing."""
    named = re.findall(r"--[a-z][a-z-]+", (Path(__file__).resolve().parents[2] / "docs" / "reference.md").read_text())
    assert {flag for flags in FLAGS.values() for flag in flags if flag != "-v"} - set(named) == set()


def test_verbose_shows_the_log(model: Path) -> None:
    args = ("plan", model, "--device-memory", "2MiB")
    assert "headrace.runtime" not in run(*args).stderr
    told = run(*args, "-v")
    assert " headrace.planning.checks: plan: <headrace.Plan " in told.stderr
    assert told.stdout == run(*args).stdout
    assert logging.getLogger("headrace").handlers == []


def test_verbose_shows_the_kernels_that_are_compiled(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And those that an earlier process has compiled; Triton calls the listener with more."""
    knobs = pytest.importorskip("triton.knobs")
    monkeypatch.setattr(knobs.compilation, "listener", None)
    with terminal.log_lines(1):
        for hit in (False, True):
            more = {"src": None, "metadata_group": {}, "cache_hit": hit}
            knobs.compilation.listener(metadata={"name": "admit"}, times=SimpleNamespace(total=250_000), **more)
    told = [line.partition(" headrace: ")[2] for line in capsys.readouterr().err.splitlines()]
    assert told == ["kernel admit compiled: 250.0 ms", "kernel admit found in Triton's cache: 250.0 ms"]


@pytest.mark.slow
@pytest.mark.parametrize("width", [80, 120])
def test_helps_and_plans_fit_the_columns(model: Path, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(terminal.stdout, "_width", width)
    verbs = ("", *FLAGS, "probe", "serve", "bench", "bench step")
    texts = [run(*verb.split(), "-h").stdout for verb in verbs]
    texts += [run("plan", model, *flags).stdout for flags in ((), ("--device-memory", "2MiB", "--batch", "1,4096"))]
    assert min(map(len, texts)) > 200
    assert max(len(line) for text in texts for line in text.splitlines()) <= width


@pytest.mark.slow
def test_a_terminal_breaks_no_words_of_an_error(tmp_path: Path) -> None:
    """In a pipe it is one line, and a terminal would break it anywhere."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
    env = {name: value for name, value in os.environ.items() if name != "COLUMNS"} | {"TERM": "xterm", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "headrace", "plan", "nothing"]
    done = subprocess.run(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env, cwd=tmp_path, check=False)
    os.close(theirs)
    with os.fdopen(ours, "rb") as output:
        lines = output.read1(1 << 16).decode().splitlines()
    assert (done.returncode, lines[0][:24]) == (2, "error: 'nothing': expect")
    assert len(lines) > 3
    assert max(map(len, lines)) <= 40
    assert "expected a folder with config.json and safetensors files" in " ".join(line.strip() for line in lines)


# -- several processes -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_other_ranks_print_errors_alone(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("RANK", "1")
    plan = ("plan", model, "--device-memory", "2MiB")
    for args in (plan, (*plan, "--json"), (*plan, "-v"), ("generate", model, "--prompt", "a", "--max-new-tokens", 1)):
        result = run(*args)
        assert (result.exit_code, result.stdout, result.stderr) == (0, "", ""), args
    assert "too small" in error_of("plan", model, "--device-memory", "1B")
    monkeypatch.setenv("RANK", "0")
    assert run(*plan).stdout


@pytest.mark.slow
def test_an_error_of_all_ranks_is_printed_once(tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    command = [*launch, "-m", "headrace", "plan", str(tmp_path / "nothing")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert len(re.findall("^error: .*no such folder", done.stderr, re.M)) == 1, done.stderr


def test_places_that_are_closed(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    for args in (("plan", model, "--device-memory", "2MiB", "--save", tmp_path / "a"), ("bench", "step", "--out", "a")):
        assert f"{args[-2]} '{args[-1]}': expected a path that user" in error_of(*args)
    assert f"--folder '{tmp_path}': expected a path that user" in error_of("demo", "--folder", tmp_path)


@pytest.mark.parametrize(("raised", "line"), [
    (RecursionError("maximum recursion depth exceeded"), "error: RecursionError: maximum recursion depth exceeded"),
    (
        RuntimeError("can't start new thread"),
        "error: the system starts no further thread (can't start new thread): raise this process's limits of threads "
        "(ulimit -u) and of memory (ulimit -v)",
    ),
    (MemoryError(), "error: no memory is left (MemoryError): free some, or raise this process's limit (ulimit -v)"),
    (
        importlib.metadata.PackageNotFoundError("transformers"),
        "error: transformers is not installed: pip install 'headrace[transformers]'",
    ),
    (ModuleNotFoundError("No module named 'x'", name="x"), "error: ModuleNotFoundError: No module named 'x'; HE"),
    (KeyError("x"), "error: KeyError: 'x'; HEADRACE_DEBUG=1 shows the traceback"),
    (RuntimeError("a\nb \x1b[2Jc"), "error: RuntimeError: a b \\x1b[2Jc; HEADRACE_DEBUG=1 shows the tr"),
    (OSError(36, "File name too long", "x"), "error: [Errno 36] File name too long: 'x'"),
    (OSError("odd"), "error: OSError: odd; HEADRACE_DEBUG=1"),
    (UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed"), "error: UnicodeEncodeError: 'utf-8'"),
], ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "")  # fmt: skip
def test_whatever_is_raised_is_one_line(
    monkeypatch: pytest.MonkeyPatch, model: Path, raised: Exception, line: str
) -> None:
    fail = raising(raised)
    monkeypatch.setattr("headrace.adapters.transformers.opened_model.open_model", fail)
    assert error_of("plan", model).startswith(line)
    assert run("plan", model).stderr.count("\n") == 1
    monkeypatch.setenv("HEADRACE_DEBUG", "1")
    assert run("plan", model).exception is raised


@pytest.mark.parametrize("raised", [MemoryError(), SystemError("<built-in> returned NULL without an exception set")])
def test_an_error_that_leaves_no_memory_to_say_it(
    raised: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(message: str) -> None:
        raise raised

    monkeypatch.setattr("headrace.cli.terminal.print_error", fail)
    assert run("plan", tmp_path).exit_code == 2
    assert capfd.readouterr().err == "error: no memory is left\n"


@pytest.mark.parametrize("place", ["", "text_config"])
def test_more_layers_than_files_can_hold(model: Path, tmp_path: Path, place: str) -> None:
    """transformers would build them first, for minutes."""
    for count in (200_000, 10**30):
        depth = {"num_hidden_layers": count}
        folder = changed(model, tmp_path / str(count), "config.json", **({place: depth} if place else depth))
        message = error_of("plan", folder, "--device-memory", "2MiB")
        assert f"found num_hidden_layers = {str(count)[:20]}; correct config.json" in message
        assert "than its safetensors files have tensors (47), or 1000" in message
        assert error_of("generate", folder, "--prompt", "a", "--device-memory", "2MiB") == message


BOMBS: dict[str, dict[str, Any]] = {
    "two levels deep": {"model_type": "llava", "text_config": {"text_config": {"n_layer": 10**6}}},
    "depths": {"model_type": "swin", "depths": [2, 200_000]},
    "attention_types": {"model_type": "gpt_neo", "attention_types": [[["global"], 10**9]]},
    "out_indices": {"model_type": "bert", "out_indices": [10**10]},
    "num_labels": {"model_type": "bert", "num_labels": 10**9},
    "modules": {"model_type": "switch_transformers", "num_experts": 10**5},
    "modules of a part": {"model_type": "mimi", "num_quantizers": 10**6},
    "products": {"model_type": "nllb-moe", "num_experts": 900, "encoder_layers": 900, "encoder_sparse_step": 1},
}


# The last three import large models.
@pytest.mark.parametrize("config", [
    pytest.param(config, id=name, marks=[pytest.mark.slow] * (name in ("modules", "modules of a part", "products")))
    for name, config in BOMBS.items()
])  # fmt: skip
def test_what_transformers_would_make_for_minutes(tmp_path: Path, config: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    begin = time.process_time()
    message = error_of("plan", tmp_path)
    assert re.search(r"expected (no larger number than|ten modules for each tensor)", message)
    assert "; correct config.json, or download it again" in message
    assert time.process_time() - begin < 5


@pytest.mark.parametrize(
    "config",
    [
        {"attn_implementation": "owner/kernel"},
        {"_attn_implementation": "paged|owner/kernel@v1:name"},
        {"experts_implementation": "owner/kernel"},
        {"attn_implementation": {"text_config": "owner/kernel"}},
        {"text_config": {"parts": [{"_attn_implementation_internal": "a", "attn_implementation": "owner/kernel"}]}},
    ],
)
def test_a_config_that_names_a_kernel_on_the_hub(model: Path, tmp_path: Path, config: dict[str, Any]) -> None:
    message = error_of("plan", changed(model, tmp_path / "kernel", "config.json", **config))
    found = "found _?[a-z]+_implementation = '[a-z|]*owner/kernel.*'; remove the entry"
    assert re.search(f"expected no kernel on the Hub, {found}", message)


def test_a_config_that_is_nested_too_deeply(model: Path, tmp_path: Path) -> None:
    folder = changed(model, tmp_path / "deep", "config.json")
    (folder / "config.json").write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    assert "config.json: expected UTF-8 JSON; found maximum recursion depth" in error_of("plan", folder)


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "x" * 5000, "\x1b[31mred", "a\nb", ".", "/", "..", "", "sub/"])
def test_odd_names_of_shards(model: Path, tmp_path: Path, name: str) -> None:
    folder = changed(model, tmp_path / "odd", "config.json")
    (folder / "sub").mkdir()
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    result = run("plan", folder)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith("error: ")
    assert result.stderr.rstrip("\n").isprintable()


@pytest.mark.slow
def test_memory_that_is_limited(model: Path) -> None:
    """Whichever allocation it is that fails, in Python or in torch."""
    for limit_mib in (300, 600):
        code = f"import resource as r; r.setrlimit(r.RLIMIT_AS, ({limit_mib} << 20,) * 2); import runpy, sys; "
        code += f"sys.argv = ['headrace', 'plan', {str(model)!r}]; runpy.run_module('headrace', run_name='__main__')"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert "Traceback" not in done.stderr
        assert done.returncode == 2, done.stderr
        assert done.stderr.splitlines()[-1].startswith("error: ")


def test_generate_refuses_the_mode_that_keeps_nothing(model: Path, tmp_path: Path) -> None:
    flags = ("--device-memory", "2MiB", "--offload-mode", "meta")
    plan = tmp_path / "plan.json"
    assert run("plan", model, *flags, "--save", plan).exit_code == 0
    for asked in (flags, ("--offload-group-size", 2, "--offload-mode", "meta"), ("--plan", plan)):
        assert "mode meta (of --offload-mode, or of the plan in --plan) stores no" in error_of(
            "generate", model, "--prompt", "Water", *asked
        )


def test_interrupt_ends_with_130_and_a_word(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    monkeypatch.setattr("headrace.adapters.transformers.opened_model.open_model", raising(KeyboardInterrupt))
    result = run("plan", model)
    assert result.exit_code == 130
    assert result.stderr == "interrupted\n"


@pytest.mark.slow
@pytest.mark.parametrize("verb", [["plan"], ["generate", "--prompt", "a"]])
def test_a_mistyped_path_is_answered_before_torch_is_imported(verb: list[str], tmp_path: Path) -> None:
    code = f"""
import sys
from headrace.cli import app
try:
    app({[*verb, str(tmp_path / "nothing")]!r})
except SystemExit as end:
    assert end.code == 2, end.code
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "no such folder" in done.stderr


@pytest.mark.slow
def test_module_and_exit_code(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "headrace", "plan", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"tokenizer_class": "pipeline"}, "tokenizer_class is 'pipeline'"),
        ({"tokenizer_class": "AutoModelForImageClassificationFast"}, "is 'AutoModelForImageClassification'"),
        ({"tokenizer_class": 5}, "'int' object has no attribute"),
        ({"eos_token": {"a": 1}}, "eos_token has to be either str"),
        ({"added_tokens_decoder": [1]}, "no attribute 'items'"),
        ({"model_max_length": "x"}, "'<' not supported|'>' not supported"),
    ],
)
def test_damaged_values_of_a_tokenizer(model: Path, tmp_path: Path, values: dict[str, Any], found: str) -> None:
    folder = changed(model, tmp_path / "damaged", "config.json")
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    message = error_of("generate", folder, "--prompt", "a", "--device-memory", "2MiB")
    assert re.search(f"a tokenizer that transformers can read .*({found}).*; mend it", message)


def test_a_key_twice_in_a_config(model: Path, tmp_path: Path) -> None:
    folder = changed(model, tmp_path / "twice", "config.json")
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace("{", '{"vocab_size": 1, ', 1))
    assert "found the key 'vocab_size' twice in one object. Download" in error_of("plan", folder)


def test_settings_in_what_is_no_file(tmp_path: Path) -> None:
    """Reading a named pipe would wait for another process."""
    os.mkfifo(tmp_path / "generation_config.json")
    with pytest.raises(CheckpointError, match=r"generation_config\.json: expected a regular file; found a named pipe"):
        read_json(tmp_path / "generation_config.json")


@pytest.mark.parametrize("path", ["a\0b", "\ud800", "~\0/a", "~\ud800"])
def test_paths_that_cannot_be(path: str) -> None:
    for call in (
        lambda: headrace.make_plan(path, "1GiB"),
        lambda: headrace.offload(torch.nn.Linear(2, 2), "1GiB", checkpoint=path),
    ):
        with pytest.raises(HeadraceError):
            call()
    assert "HEADRACE_DEBUG" not in error_of("plan", path)


# -- code of a model's folder ------------------------------------------------------------------------------------------


def coded(folder: Path, file: str, auto_class: str, **changes: object) -> Path:
    """``folder`` with Python code of its own, which leaves a file ``ran``, for ``auto_class`` by its ``file``."""
    (folder / "code.py").write_text(f"open({str(folder / 'ran')!r}, 'w').close()\nraise ValueError\n")
    names = ["code.Mine", "code.Mine"] if auto_class == "AutoTokenizer" else "code.Mine"
    (folder / file).write_text(json.dumps({"auto_map": {auto_class: names}, **changes}))
    return folder


@pytest.mark.slow
def test_no_answer_on_stdin_runs_code_of_a_folder(model: Path, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "part").mkdir()
    whole = coded(tmp_path / "whole", "config.json", "AutoModel", model_type="depth_anything")
    part = {"model_type": "depth_anything", "auto_map": {"AutoModel": "code.Mine"}}
    coded(tmp_path / "part", "config.json", "AutoModel", model_type="llava", vision_config=part)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    words = tmp_path / "words"
    LlamaForCausalLM(LlamaConfig(vocab_size=512, **sizes)).save_pretrained(words)
    coded(words, "tokenizer_config.json", "AutoTokenizer", tokenizer_class="Mine")
    shutil.copy(model / "tokenizer.json", words)
    for args in (
        ("plan", whole),
        ("plan", tmp_path / "part"),
        ("generate", whole, "--prompt", "a"),
        ("chat", words),
        ("serve", words),
        ("generate", model, "--prompt", "a", "--device-memory", "2MiB", "--speculate", words, "--max-new-tokens", 1),
    ):
        assert "Do you wish to run" not in run(*args, stdin="y\n").output, args
    assert list(tmp_path.glob("*/ran")) == []


def test_every_call_of_an_auto_class_refuses_code() -> None:
    """Of classes that a variable holds, too."""
    lax, found = [], 0
    for file in [file for room in ("src", "benchmarks") for file in (ROOT / room).rglob("*.py")]:
        if not re.search("from_(pretrained|config)", file.read_text()):
            continue
        for call in ast.walk(ast.parse(file.read_text())):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
                continue
            owner = ast.unparse(call.func.value).rpartition(".")[2]
            may_ask = owner.islower() or (owner.startswith("Auto") and owner != "AutoHfQuantizer")
            if call.func.attr in ("from_pretrained", "from_config") and may_ask:
                found += 1
                if not any(
                    key.arg == "trust_remote_code" and ast.unparse(key.value) == "False" for key in call.keywords
                ):
                    lax.append(f"{file.name}:{call.lineno}")
        assert not re.search(r"getattr\([^)]*from_(pretrained|config)", file.read_text()), file
    assert lax == []
    assert found > 8
