"""The promise: with ``experts_implementation="headrace"`` a model has its resident bits in every way to offload it.

The bits are those of the reference in C, too, layer by layer; bf16 and MXFP4, resident, streamed and cached.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from transformers.integrations import moe

import headrace
import quantised_checkpoints
from headrace.adapters.transformers import load, load_folder, ordered_experts
from headrace.adapters.transformers.load_folder import build_meta_model
from headrace.adapters.transformers.ordered_experts import Mxfp4Experts
from headrace.errors import OptionError, OptionTypeError
from headrace.experts import ordered
from headrace.experts.order import Projection
from headrace.testing import assert_same_bits
from moe_models import IDS, cached, gpt_oss, qwen
from ordered_c import compared_with_c, projection
from quantised_checkpoints import FORMATS, resident

MOVING = {
    "cached": lambda: cached(3),
    "prefetch": lambda: headrace.Prefetch(1, 1, 1, ["experts"]),
    "prefetched and cached": lambda: headrace.Rules([("experts", "cache"), ("@attention", "prefetch")], expert_slots=2),
}
MODELS = {"qwen3_moe": qwen, "gpt_oss": gpt_oss}


def step(model: nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return model(IDS[:, 1:3]).logits


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_a_resident_model_has_the_bits_of_c(name: str) -> None:
    """Also where they lie in slots: a cache's rows are compared as they were when they were read."""
    model = MODELS[name]().bfloat16()
    plain = step(model)
    model.set_experts_implementation("headrace")
    with compared_with_c() as counts:
        expected = step(model)
    assert counts == [0, 0]
    torch.testing.assert_close(expected, plain, rtol=0.05, atol=0.05)
    with headrace.offload(model, cached(2)) as handle:
        assert_same_bits(step(model), expected)
        assert handle.stats().bytes_moved > 0


@pytest.mark.slow
@pytest.mark.parametrize("way", MOVING)
@pytest.mark.parametrize("name", MODELS)
def test_offloaded(name: str, way: str) -> None:
    model = MODELS[name]().bfloat16()
    model.set_experts_implementation("headrace")
    expected = step(model)
    with headrace.offload(model, MOVING[way]()) as handle:
        assert_same_bits([step(model), step(model)], [expected] * 2)
        assert handle.stats().bytes_moved > 0
    assert_same_bits(step(model), expected)


def test_more_rows_run_as_they_do_today() -> None:
    model = qwen().bfloat16()
    ids = torch.arange(9)[None]
    with torch.inference_mode():
        expected = model(ids).logits
        model.set_experts_implementation("headrace")
        assert_same_bits(model(ids).logits, expected)


@pytest.mark.slow
def test_compiled_code_calls_it() -> None:
    model = qwen("headrace").bfloat16()
    expected = step(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert_same_bits(step(compiled), expected)
    torch._dynamo.reset()


@pytest.mark.parametrize("by", ["interpreter", "threads"])
def test_gradients_of_many_rows(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They keep the weights of each expert, which are unpacked one after another."""
    if by == "threads":
        monkeypatch.delenv("TRITON_INTERPRET")
    made = torch.Generator().manual_seed(0)
    sizes = SimpleNamespace(num_local_experts=4, hidden_size=64, intermediate_size=96)
    experts = Mxfp4Experts(sizes)
    for name, (rows, columns) in {"gate_up_proj": (192, 64), "down_proj": (64, 96)}.items():
        for end, given in zip(("blocks", "scales"), projection("mxfp4", 4, rows, columns, made=made)[:2], strict=True):
            parameter = experts.get_parameter(f"{name}_{end}")
            parameter.data.copy_(given.view(parameter.shape))  # type: ignore[union-attr]
        experts.get_parameter(f"{name}_bias").data.normal_(generator=made)
    ids, weights = torch.randint(4, (24, 2), generator=made), torch.rand(24, 2, generator=made).bfloat16()
    found, expected = (torch.randn(24, 64, generator=made).bfloat16() * 1e-3 for _ in range(2))
    expected.copy_(found)
    experts(found.requires_grad_(), ids, weights).float().sum().backward()
    experts(found.detach(), ids, weights.clone().requires_grad_()).sum().backward()  # those of a router alone
    first, second, _, (alpha, limit) = ordered_experts.arguments_of(experts)
    total = torch.zeros(())
    for x, row, share in zip(expected.requires_grad_(), ids.tolist(), weights, strict=True):
        for expert, weight in zip(row, share, strict=True):
            both = linear(x, first.values(expert).bfloat16(), first.bias[expert])  # type: ignore[index]
            gate, up = both[::2].clamp(max=limit), both[1::2].clamp(-limit, limit)
            inner = (up + 1) * (gate * torch.sigmoid(gate * alpha))
            out = linear(inner, second.values(expert).bfloat16(), second.bias[expert])  # type: ignore[index]
            total = total + (out * weight).float().sum()
    total.backward()
    torch.testing.assert_close(found.grad, expected.grad, rtol=0.05, atol=0.05)
    assert found.grad.abs().max() > 0.1  # type: ignore[union-attr]


class TestLoad:
    @pytest.mark.slow
    def test_qwen(self, tmp_path: Path) -> None:
        qwen().bfloat16().save_pretrained(tmp_path)
        model = resident(tmp_path)
        model.set_experts_implementation("headrace")
        expected = step(model)
        loaded, handle = load(tmp_path, cached(3), device="cpu", experts_implementation="headrace")
        with handle:
            assert loaded.config._experts_implementation == "headrace"
            assert_same_bits(step(loaded), expected)
            assert handle.stats().bytes_moved > 0

    @pytest.mark.slow
    @pytest.mark.parametrize("way", ["cached", "prefetch"])
    def test_mxfp4_as_the_files_have_it(self, way: str, tmp_path: Path) -> None:
        """Its bits are those of its values in bf16, and of C; nothing is converted, so units stream from the files."""
        FORMATS["MXFP4, experts"].write(tmp_path)
        plain = resident(tmp_path)
        plain.set_experts_implementation("headrace")
        expected = step(plain)
        model, handle = load(tmp_path, MOVING[way](), device="cpu", experts_implementation="headrace")
        with handle:
            assert isinstance(model.model.layers[1].mlp.experts, Mxfp4Experts)
            assert_same_bits(step(model), expected)
            assert handle.stats().bytes_moved > 0
        with compared_with_c() as counts:
            assert_same_bits(step(model), expected)
        assert counts == [0, 0, 0]

    @pytest.mark.slow
    @pytest.mark.parametrize("way", ["cached", "prefetch"])
    @pytest.mark.parametrize(
        ("form", "kind", "share"),
        [("compressed-tensors int4, experts", "Int4Experts", 0.25), ("fp8, blocks, experts", "FP8Experts", 0.5)],
    )
    def test_other_formats_as_the_files_have_them(
        self, form: str, kind: str, share: float, way: str, tmp_path: Path
    ) -> None:
        """Bits of the library's model, which makes bf16 of them; experts keep the bytes of the files."""
        if not FORMATS[form].is_here:
            pytest.skip(f"{FORMATS[form].package} is not installed")
        FORMATS[form].write(tmp_path)
        plain = resident(tmp_path)
        plain.set_experts_implementation("headrace")
        expected, many = step(plain), torch.arange(20)[None]
        model, handle = load(tmp_path, MOVING[way](), device="cpu", experts_implementation="headrace")
        with handle:
            assert type(model.model.layers[1].mlp.experts).__name__ == kind
            sizes = [sum(p.nbytes for p in each.model.layers[1].mlp.experts.parameters()) for each in (plain, model)]
            assert share < sizes[1] / sizes[0] < share * 1.3
            assert_same_bits(step(model), expected)
            assert handle.stats().bytes_moved > 0
            with torch.inference_mode():
                found = model(many).logits
        with compared_with_c() as counts, torch.inference_mode():
            assert_same_bits(step(model), expected)
            assert_same_bits(model(many).logits, found)
            torch.testing.assert_close(found, plain(many).logits, rtol=0.02, atol=0.02)
        assert set(counts) == {0}

    @pytest.mark.slow
    def test_many_rows_of_mxfp4(self, tmp_path: Path) -> None:
        """Each expert in use is multiplied as bf16; cached, too."""
        FORMATS["MXFP4, experts"].write(tmp_path)
        ids = torch.arange(20)[None]
        with torch.inference_mode():
            plain = resident(tmp_path)
            model, handle = load(tmp_path, cached(3), device="cpu", experts_implementation="headrace")
            found = model(ids).logits
            torch.testing.assert_close(found, plain(ids).logits, rtol=0.02, atol=0.02)
            handle.remove()
            assert_same_bits(model(ids).logits, found)

    @pytest.mark.slow
    @pytest.mark.parametrize("form", ["MXFP4, experts", "compressed-tensors int4, experts", "fp8, blocks, experts"])
    def test_prompts_on_a_cpu(self, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """By threads, without the interpreter: few rows of an expert in the order of sums, more by unpacked weights."""
        if not FORMATS[form].is_here:
            pytest.skip(f"{FORMATS[form].package} is not installed")
        monkeypatch.delenv("TRITON_INTERPRET")
        FORMATS[form].write(tmp_path)
        plain, unpack, unpacked = resident(tmp_path), ordered.unpack, []

        def counted(projection: Projection, expert: int, out: torch.Tensor) -> torch.Tensor:
            unpacked.append(expert)
            return unpack(projection, expert, out)

        monkeypatch.setattr(ordered, "unpack", counted)
        model, handle = load(tmp_path, MOVING["prefetch"](), device="cpu", experts_implementation="headrace")
        prompts = {length: torch.arange(length)[None] % 100 for length in (9, 200)}
        with torch.inference_mode():
            with handle:
                found = {length: (model(ids).logits, len(unpacked)) for length, ids in prompts.items()}
                assert handle.stats().bytes_moved > 0
            assert found[9][1] == 0 < found[200][1]
            for length, ids in prompts.items():
                assert_same_bits(model(ids).logits, found[length][0])
                torch.testing.assert_close(found[length][0], plain(ids).logits, rtol=0.02, atol=0.02)

    @pytest.mark.slow
    def test_int4_in_groups_that_no_kernel_has(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The library makes bf16 of them, as where nobody asks for an implementation."""
        form = FORMATS["compressed-tensors int4, experts"]
        if not form.is_here:
            pytest.skip(f"{form.package} is not installed")
        stated = copy.deepcopy(form.config)
        stated["config_groups"]["group_0"]["weights"]["group_size"] = 16  # type: ignore[index]
        monkeypatch.setattr(quantised_checkpoints, "GROUP", 16)
        replace(form, config=stated).write(tmp_path)
        plain = resident(tmp_path)
        plain.set_experts_implementation("headrace")
        model, handle = load(tmp_path, MOVING["prefetch"](), device="cpu", experts_implementation="headrace")
        with handle, torch.inference_mode():
            assert type(model.model.layers[0].mlp.experts).__name__ == "Qwen3MoeExperts"
            for length in (2, 60):
                ids = torch.arange(length)[None]
                assert_same_bits(model(ids).logits, plain(ids).logits)
            assert handle.stats().bytes_moved > 0

    @pytest.mark.parametrize(
        ("given", "kind", "words"),
        [
            (3, OptionTypeError, "expected a name such as 'grouped_mm', found 3"),
            ("owner/kernel", OptionError, r"expected one .*\(batched_mm, .*headrace"),
        ],
    )
    def test_names(self, tmp_path: Path, given: Any, kind: type[Exception], words: str) -> None:
        qwen().save_pretrained(tmp_path)
        with pytest.raises(kind, match=words):
            load(tmp_path, "1GiB", device="cpu", experts_implementation=given)

    def test_without_effect(self, tmp_path: Path) -> None:
        qwen(hidden_act="gelu").save_pretrained(tmp_path)
        with pytest.raises(OptionError, match="found the activation of Qwen3MoeExperts"):
            load(tmp_path, "1GiB", device="cpu", dtype="bfloat16", experts_implementation="headrace")
        qwen().save_pretrained(tmp_path)
        with pytest.raises(OptionError, match=r"in torch.bfloat16, found torch.float32"):
            load(tmp_path, "1GiB", device="cpu", dtype="float32", experts_implementation="headrace")
        qwen(num_experts=0).save_pretrained(tmp_path)
        with pytest.raises(OptionError, match="expected a model with fused experts"):
            load(tmp_path, "1GiB", device="cpu", dtype="bfloat16", experts_implementation="headrace")


class TestDefault:
    """On a GPU it runs what it can, unless the caller names another."""

    def chosen(self, folder: Path, device: str, **options: Any) -> str:
        model = build_meta_model(folder, device=torch.device(device), **options)
        return model.config._experts_implementation  # type: ignore[no-any-return]

    def test_bf16(self, tmp_path: Path) -> None:
        qwen().bfloat16().save_pretrained(tmp_path)
        assert self.chosen(tmp_path, "cuda") == "headrace"
        assert self.chosen(tmp_path, "cpu") == "grouped_mm"
        assert self.chosen(tmp_path, "cuda", experts_implementation="grouped_mm") == "grouped_mm"
        assert self.chosen(tmp_path, "cuda", dtype="float32") == "grouped_mm"
        qwen(hidden_act="gelu").bfloat16().save_pretrained(tmp_path)
        assert self.chosen(tmp_path, "cuda") == "grouped_mm"

    @pytest.mark.parametrize("has_kernels", [False, True])
    def test_mxfp4(self, has_kernels: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """transformers runs it where its package of kernels is there."""
        FORMATS["MXFP4, experts"].write(tmp_path)
        asked = list[Any]()
        monkeypatch.setattr("transformers.quantizers.quantizer_mxfp4.is_kernels_available", lambda: has_kernels)
        monkeypatch.setattr(load_folder, "open_quantizer", lambda *given: asked.append(given))
        model: Any = build_meta_model(tmp_path, device=torch.device("cuda"))
        assert isinstance(model.model.layers[0].mlp.experts, Mxfp4Experts) is not has_kernels
        assert len(asked) == has_kernels
        assert model.config._experts_implementation == "headrace"

    def test_without_triton(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        qwen().bfloat16().save_pretrained(tmp_path)
        monkeypatch.setattr("headrace.planning.request.find_spec", lambda name: None)
        assert self.chosen(tmp_path, "cuda") == "grouped_mm"
        with pytest.raises(OptionError, match=r"expected Triton, .*pip install triton"):
            self.chosen(tmp_path, "cuda", experts_implementation="headrace")
        assert self.chosen(tmp_path, "cpu", experts_implementation="headrace") == "headrace"

    def test_it_is_said(self) -> None:
        with headrace.offload(qwen("headrace").bfloat16(), cached(3)) as handle:
            assert "experts of up to 8 rows run by 'headrace', of more by 'grouped_mm'" in handle.stats().notes


def test_it_is_registered() -> None:
    assert moe.ALL_EXPERTS_FUNCTIONS["headrace"] is ordered_experts.ordered_experts_forward
