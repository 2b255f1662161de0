"""The promise: every way in prepares an offload once, by the same steps, and through a bounded number of files."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import headrace
from commands import TINY, run
from headrace.adapters.transformers import load
from headrace.cli.demo_run import ensure_model
from headrace.memory.system import read_limits
from headrace.model.inventory import take_inventory
from headrace.model.live_tensors import bind
from headrace.plan.build import Planner
from headrace.planning.checks import check_limits
from headrace.planning.context import make_planner
from headrace.planning.request import compute_device
from headrace.runtime.prepare import prepare
from models import Stack, save

SOURCES = str(Path(headrace.__file__).parent)
# Threads included; what a first call imports or warms up is not.
MAX_FILES = {"offload": 44, "load": 52}

STEPS: dict[str, Callable[..., Any]] = {
    "inventory": take_inventory, "binding": bind, "planner": Planner.__init__, "rates": make_planner,
    "limits": read_limits, "limit check": check_limits, "front door": prepare,
}  # fmt: skip


class Trace:
    """Calls of functions of headrace's in all threads."""

    def __init__(self) -> None:
        self.calls: Counter[CodeType] = Counter()

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        if event == "call":
            self.calls[frame.f_code] += 1

    @property
    def files(self) -> list[str]:
        """Those of which anything was called."""
        return sorted({code.co_filename for code in self.calls if code.co_filename.startswith(SOURCES)})

    def counts(self) -> dict[str, int]:
        """How often each step was taken."""
        return {step: self.calls[function.__code__] for step, function in STEPS.items()}


@contextmanager
def traced() -> Iterator[Trace]:
    trace = Trace()
    threading.setprofile(trace)
    sys.setprofile(trace)
    try:
        yield trace
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 256}
    config = Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=4, head_dim=16)
    Qwen3ForCausalLM(config).eval().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


ONCE = dict.fromkeys(STEPS, 1)
# Free memory counts for a budget over files, too, which it may not hold.
OVER_FILES = {**ONCE, "limits": 2}


def show(what: str, trace: Trace, most: int) -> None:
    files = [file.removeprefix(SOURCES + "/") for file in trace.files]
    print(f"{what} runs through {len(files)} files: {', '.join(files)}")
    assert len(files) <= most


def test_offload_with_a_budget(tmp_path: Path) -> None:
    model = Stack(8, 256).eval()
    checkpoint = save(model, tmp_path)
    headrace.offload(model, "1MiB", checkpoint=checkpoint).remove()
    with traced() as trace:
        handle = headrace.offload(model, "1MiB", checkpoint=checkpoint)
    assert handle.plan.units
    handle.remove()
    assert trace.counts() == OVER_FILES
    show("offload(model, budget, checkpoint=)", trace, MAX_FILES["offload"])


def test_offload_with_a_plan_builds_no_planner() -> None:
    model = Stack(8, 256).eval()
    with headrace.offload(model, "1MiB") as handle:
        plan = handle.plan
    with traced() as trace:
        handle = headrace.offload(model, plan)
    handle.remove()
    assert trace.counts() == {**ONCE, "planner": 0, "rates": 0}


@pytest.mark.parametrize("kind", ["module", "folder"])
def test_plans_alone(kind: str, folder: Path) -> None:
    """The same steps, but for what carries a plan out; the tensors of a folder's model are those of its headers."""
    model = Stack(8, 256).eval() if kind == "module" else folder
    headrace.make_plan(model, "2MiB")
    with traced() as trace:
        assert headrace.make_plan(model, "2MiB").units
    expected = ONCE if kind == "module" else OVER_FILES
    assert trace.counts() == {**expected, "front door": 0, "binding": int(kind == "module")}


@torch.no_grad()
def test_load(folder: Path) -> None:
    load(folder, "2MiB")[1].remove()
    with traced() as trace:
        _, handle = load(folder, "2MiB")
    assert handle.plan.units
    handle.remove()
    assert trace.counts() == OVER_FILES
    show("load(folder, budget)", trace, MAX_FILES["load"])


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("diffusers") is None, reason="diffusers is not installed")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_pipeline_of_diffusers() -> None:
    """All its components through the door at once."""
    import pipelines
    from headrace.adapters.diffusers import load as load_pipeline

    pipe = pipelines.build("flux")
    load_pipeline(pipe, "12MiB")[1].remove()
    with traced() as trace:
        _, handle = load_pipeline(pipe, "12MiB")
    assert {unit.module_fqn.split(".")[0] for unit in handle.plan.units} == {
        "text_encoder", "text_encoder_2", "transformer", "vae",
    }  # fmt: skip
    handle.remove()
    assert trace.counts() == ONCE


@pytest.mark.slow
def test_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``headrace serve MODEL``, up to its first request."""
    folder = tmp_path / "model"
    ensure_model(folder, TINY)
    handles: list[headrace.Handle] = []  # the command keeps its own until the process ends
    monkeypatch.setattr("headrace.serving.app.App", lambda switch, *_: handles.append(switch.running.handle))
    monkeypatch.setattr("headrace.serving.listening.run_app", lambda *_: None)
    command = ("serve", folder, "--device-memory", "2MiB", "--port", "0")
    assert run(*command).exit_code == 0
    with traced() as trace:
        assert run(*command).exit_code == 0
    found = trace.counts()
    assert found["front door"] == found["binding"] == 1
    assert len(handles) == 2
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("kind", ["prefetch", "uva"])
def test_engines(kind: str) -> None:
    offloader = headrace.PrefetchOffloader(2, 1, 1) if kind == "prefetch" else headrace.UVAOffloader(10**6)
    layers = Stack(8, 256).eval().layers
    offloader.wrap_modules(iter(layers))
    with traced() as trace:
        offloader.post_init()
    offloader.remove()
    found = trace.counts()
    assert {step: found[step] for step in STEPS if step != "planner"} == {
        step: int(step != "rates") for step in STEPS if step != "planner"
    }


def test_the_device_is_that_of_the_model_or_a_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rule for every way in: a model on meta, whatever its buffers are on, waits for its weights there."""
    live, waiting = Stack(), Stack().to("meta")
    waiting.register_buffer("made_by_the_constructor", torch.zeros(3))
    assert [compute_device(model) for model in (live, waiting)] == [torch.device("cpu")] * 2
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert compute_device(live) == torch.device("cpu")
    assert compute_device(waiting) == torch.device("cuda", 0)
    assert compute_device(waiting, "cpu") == torch.device("cpu")
    live.register_buffer("elsewhere", torch.zeros(3, device="meta"))
    assert compute_device(live) == torch.device("cpu")
