"""The promise: choices of experts are recorded as they are made, cached or not, and plans predict from them."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoConfig

import headrace
from commands import TINY, error_of, succeed
from headrace.cli.demo_run import ensure_model
from headrace.config import Budget
from headrace.errors import OptionError
from headrace.experts.recorder import RoutingRecorder
from headrace.plan.routing_traces import ExpertHits, Recorded, load_trace, lru_hits, save_trace, seeded_trace
from moe_models import IDS, cached, qwen


@pytest.mark.slow
def test_what_is_recorded_is_what_was_chosen() -> None:
    model = qwen()
    chosen: list[list[torch.Tensor]] = [[], []]
    for index, layer in enumerate(model.model.layers):
        layer.mlp.experts.register_forward_pre_hook(lambda _, args, index=index: chosen[index].append(args[1]))
    for policy in (None, cached(3)):
        for each in chosen:
            each.clear()
        handle = None if policy is None else headrace.offload(model, policy)
        recorder = RoutingRecorder(model, torch.device("cpu"), capacity=20)
        with torch.inference_mode():
            for tokens in (IDS, IDS[:, :1], IDS[:, 2:4]):
                model(tokens)
        recorded = recorder.close()
        for layer, ids in zip(recorded.layers, chosen, strict=True):
            assert np.array_equal(layer, torch.cat(ids).numpy())
        assert recorded.num_experts == 8
        with torch.inference_mode():
            model(IDS)  # recorded no more
        if handle is not None:
            handle.remove()


def test_the_last_tokens_are_kept() -> None:
    model = qwen()
    recorder = RoutingRecorder(model, torch.device("cpu"), capacity=5)
    whole = RoutingRecorder(model, torch.device("cpu"), capacity=100)
    with torch.inference_mode():
        for tokens in (IDS[:, :3], IDS[:, :1], IDS[:, :4], IDS):
            model(tokens)
    for last, every in zip(recorder.close().layers, whole.close().layers, strict=True):
        assert np.array_equal(last, every[-5:])


def test_refused_without_experts_or_runs() -> None:
    with pytest.raises(OptionError, match="has no experts whose choices could be recorded"):
        RoutingRecorder(nn.Linear(2, 2), torch.device("cpu"))
    with pytest.raises(OptionError, match="run the model before"):
        RoutingRecorder(qwen(), torch.device("cpu")).close()


def test_files(tmp_path: Path) -> None:
    recorded = Recorded((seeded_trace(1, 50, 16, 2), seeded_trace(2, 50, 16, 2)), 16)
    save_trace(recorded, tmp_path / "trace")
    found = load_trace(tmp_path / "trace")
    assert found.num_experts == 16
    assert all(np.array_equal(a, b) for a, b in zip(found.layers, recorded.layers, strict=True))
    assert found.layers[0].dtype == np.int32
    (tmp_path / "text").write_text("no trace")
    with pytest.raises(OptionError, match=r"text: expected a trace that `headrace generate --expert-trace` wrote"):
        load_trace(tmp_path / "text")
    np.savez(tmp_path / "high.npz", ids=np.full((1, 2, 2), 16), num_experts=16)
    message = r"expected ids \[layers, tokens, top_k\] from 0 to 15, found int64 \[1, 2, 2\]"
    with pytest.raises(OptionError, match=message):
        load_trace(tmp_path / "high.npz")
    with pytest.raises(OptionError, match="can be written there"):
        save_trace(recorded, tmp_path / "none" / "trace")


def npy(value: Any) -> bytes:
    raw = io.BytesIO()
    np.save(raw, value)
    return raw.getvalue()


def claims(shape: tuple[int, ...]) -> bytes:
    raw = io.BytesIO()
    np.lib.format.write_array_header_1_0(raw, {"descr": "<i2", "fortran_order": False, "shape": shape})
    return raw.getvalue()


@pytest.mark.parametrize(
    ("ids", "num_experts"),
    [
        (claims((1, 2**40, 1)), npy(4)), (claims((1, 2**62, 8)), npy(4)), (npy([[[1]]]), npy(np.inf)),
        (npy([[[1]]]), npy([1, 2])), (npy([[[1]]]), npy("x")), (b"", b""), (None, b""), (None, npy([[[1]]])),
    ],
    ids=["2 TiB", "overflow", "infinity", "two numbers", "text", "nothing in it", "an empty file", "one array"],
)  # fmt: skip
def test_damaged_files(ids: bytes | None, num_experts: bytes, tmp_path: Path) -> None:
    file = tmp_path / "trace.npz"
    if ids is None:
        file.write_bytes(num_experts)
    else:
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("ids.npy", ids)
            archive.writestr("num_experts.npy", num_experts)
    message = r"trace\.npz: expected a trace that `headrace generate --expert-trace` wrote"
    with pytest.raises(OptionError, match=message):
        load_trace(file)


# Published: github.com/kekzl/imp/pull/1374 (Qwen3-30B-A3B, three of its slots an expert) and
# github.com/ggml-org/llama.cpp/pull/27861 (Qwen3.8-Flash-Next).
@pytest.mark.parametrize(
    ("slots", "experts", "top_k", "published"),
    [(24, 128, 8, 0.74), (49, 128, 8, 0.89), (81, 128, 8, 0.96), (64, 512, 10, 0.67), (128, 512, 10, 0.81)],
)
def test_the_seeded_trace_hits_as_published_ones_do(slots: int, experts: int, top_k: int, published: float) -> None:
    assert ExpertHits()(slots, experts, top_k, top_k) == pytest.approx(published, abs=0.02)
    other = lru_hits(seeded_trace(1, 640, experts, top_k), slots, warm_up=128)
    assert other == pytest.approx(published, abs=0.03), "whatever the seed"


def test_hits_of_a_recorded_trace() -> None:
    layers = tuple(seeded_trace(seed, 100, 16, 2) for seed in range(3))
    expected = sum(lru_hits(trace, 5, warm_up=20) for trace in layers) / 3
    assert ExpertHits(Recorded(layers, 16))(5, 16, 2, 2) == pytest.approx(expected)


def test_a_plan_from_a_trace(tmp_path: Path) -> None:
    model = qwen()
    fixed = np.tile(np.array([[3, 5]], np.int32), (60, 1))  # always the same two
    save_trace(Recorded((fixed, fixed), 8), tmp_path / "same")
    save_trace(Recorded((fixed, fixed), 9), tmp_path / "other")
    policy = Budget("16MiB", rules=[("experts", "cache")], expert_slots=2)
    plans = [headrace.make_plan(model, policy, machine="h200", expert_trace=t) for t in (None, tmp_path / "same")]
    seeded, recorded = (plan.prediction.caches for plan in plans)  # type: ignore[attr-defined]
    assert [point.hits for point in recorded if point.num_slots >= 2] == [1.0] * len(recorded)
    assert seeded[0].hits < 1
    with pytest.raises(OptionError, match="a trace of 9 experts; expected one of this model, whose layers have 8"):
        headrace.make_plan(model, policy, machine="h200", expert_trace=tmp_path / "other")


def test_the_command_line(tmp_path: Path) -> None:
    """Record while generating, then plan from it."""
    folder, trace = tmp_path / "moe", tmp_path / "choices"
    ensure_model(folder, TINY)  # for its tokenizer
    for weights in folder.glob("*.safetensors*"):
        weights.unlink()
    qwen(vocab_size=AutoConfig.from_pretrained(folder).vocab_size).save_pretrained(folder)
    told = ["generate", folder, "--prompt", "Water", "--max-new-tokens", 6, "--device-memory", "2MiB"]
    result = succeed(*told, "--expert-trace", trace)
    assert "2 layers, " in result.stderr
    assert load_trace(trace).num_experts == 8
    rule = ["--offload-rule", "experts=cache", "--expert-slots", 3, "--machine", "h200", "--device-memory", "16MiB"]
    planned = succeed("plan", folder, *rule, "--expert-trace", trace)
    assert "Cached experts, tokens/s" in planned.stdout
    assert "recorded trace" in planned.stdout
    assert "no effect" in error_of("plan", folder, "--expert-trace", trace)
