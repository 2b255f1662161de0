"""Speculation on a GPU: the tokens of the resident model run the same way, beside calls that decode in CUDA graphs."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import Prefetch, Speculation
from headrace.errors import HeadraceWarning

pytestmark = pytest.mark.usefixtures("no_grad")

transformers = pytest.importorskip("transformers")
loading = pytest.importorskip("headrace.adapters.transformers")
decoding = pytest.importorskip("headrace.graphs.decoding")
speculating = pytest.importorskip("headrace.adapters.transformers.speculating")

SIZES = {
    "vocab_size": 512, "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 1024, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
CALL: dict[str, Any] = {"max_new_tokens": 64, "pad_token_id": 0}


def written(folder: Path, layers: int, dtype: torch.dtype = torch.bfloat16) -> Path:
    torch.manual_seed(layers)
    config = transformers.Qwen3Config(**SIZES, num_hidden_layers=layers)
    transformers.Qwen3ForCausalLM(config).to(dtype).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("guesser", ["lookup", "draft"])
def test_tokens_of_the_resident_model(guesser: str, tmp_path: Path) -> None:
    target, draft = written(tmp_path / "target", 8), written(tmp_path / "draft", 1)
    speculation = Speculation("lookup" if guesser == "lookup" else str(draft), 4)
    resident = transformers.Qwen3ForCausalLM.from_pretrained(target, dtype="auto").cuda().eval()
    plain = transformers.Qwen3ForCausalLM.from_pretrained(target, dtype="auto").cuda().eval()
    speculating.Speculating(resident, speculation, torch.device("cuda")).attach()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HeadraceWarning)  # such small models need not be faster
        model, handle = loading.load(target, Prefetch(2, 1, 2), speculate=speculation)
    prompt = torch.arange(12, device="cuda").remainder(5)[None] + 1  # 0 is padding
    for sampled in ({"do_sample": False}, {"do_sample": True, "top_k": 30}):
        found = []
        for each in (model, resident, model):
            torch.manual_seed(0)
            found.append(each.generate(prompt, **CALL, **sampled).tolist())
        assert found[0] == found[1] == found[2]
    stats = handle.stats()
    assert stats.bytes_moved > 0
    assert stats.speculation.tokens == 4 * 64
    assert stats.speculation.passes < 4 * 64
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HeadraceWarning)
        several = [each.generate(prompt.repeat(2, 1), **CALL, do_sample=False) for each in (model, plain)]
    assert several[0].shape == several[1].shape
    assert handle._session.attachments[0].replays > 0
    handle.remove()
    assert "generate" not in vars(model)
    assert torch.equal(model.generate(prompt, **CALL, do_sample=False), plain.generate(prompt, **CALL, do_sample=False))


def test_a_captured_draft_guesses_what_it_would_generate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is its own draft, so all guesses are accepted. In float32: in bf16, two tokens are often a tie."""
    target = written(tmp_path / "target", 4, torch.float32)
    replays, step = [], decoding.StepGraph.replay
    monkeypatch.setattr(decoding.StepGraph, "replay", lambda graph, inputs: (replays.append(1), step(graph, inputs))[1])
    prompt = torch.arange(12, device="cuda").remainder(5)[None] + 1  # 0 is padding
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HeadraceWarning)  # such small models need not be faster
        model, handle = loading.load(target, Prefetch(2, 1, 2), speculate=Speculation(str(target), 4, accepted=1.5))
    with warnings.catch_warnings():
        warnings.simplefilter("error", HeadraceWarning)
        found = [model.generate(prompt, **CALL, do_sample=False).tolist() for _ in range(2)]
    assert handle.stats().speculation.passes == 2 * 13
    assert handle.stats().bytes_moved > 0
    made = len(replays)
    assert made >= 2 * 13 * 4 - 8
    monkeypatch.setattr(decoding, "GRAPH_DEVICES", ())
    assert [model.generate(prompt, **CALL, do_sample=False).tolist()] * 2 == found
    assert len(replays) == made
    handle.remove()


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_heads_guess_as_beside_the_resident_model(kind: str, tmp_path: Path) -> None:
    heads, models = pytest.importorskip("heads"), pytest.importorskip("models")
    target = heads.mellum(tmp_path, kind, vocabulary=4096)
    resident = models.aligned(transformers.MellumForCausalLM.from_pretrained(target).cuda().eval())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HeadraceWarning)  # such small models need not be faster
        model, handle = loading.load(target, Prefetch(2, 1, 1), speculate="mtp")
    prompt = torch.tensor([[5, 9, 3, 5, 9, 3, 5, 9]], device="cuda")
    for sampled in ({"do_sample": False}, {"do_sample": True, "top_k": 20}):
        found = []
        for each, options in ((model, {}), (resident, {"use_mtp": True}), (model, {})):
            torch.manual_seed(0)
            found.append(each.generate(prompt, **CALL, **sampled, **options).tolist())
        assert found[0] == found[1] == found[2]
    stats = handle.stats()
    assert stats.bytes_moved > 0
    assert (stats.speculation.guesser, stats.speculation.tokens) == ("mtp", 4 * 64)
    assert 4 * 32 < stats.speculation.passes < 4 * 64
    handle.remove()
    assert torch.equal(
        model.generate(prompt, **CALL, do_sample=False), resident.generate(prompt, **CALL, do_sample=False)
    )
