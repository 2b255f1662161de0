"""The promise: ``generate`` gives the same tokens and logits with its steps in graphs, or runs eagerly and says why.

Graphs of a CPU here: operators of one step that run again (recorded_graphs.py). tests/gpu has CUDA's.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import headrace
from checks import entering, raising, run_threads
from headrace.errors import HeadraceWarning, OptionError
from headrace.graphs import decoding
from headrace.graphs.decoding import StepGraph
from recorded_graphs import SIZES, WINDOWS, RecordedStep

LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "first_k_dense_replace": 4, "num_key_value_heads": 4,
}  # fmt: skip


def qwen3(**more: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**{**SIZES, **more})
    return transformers.Qwen3ForCausalLM(config).eval().requires_grad_(False)


def gemma3() -> Any:
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(**{**SIZES, **WINDOWS})
    return transformers.Gemma3ForCausalLM(config).eval().requires_grad_(False)


def experts() -> Any:
    torch.manual_seed(0)
    sizes = {**SIZES, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = transformers.Qwen3MoeConfig(**sizes, experts_implementation="batched_mm")
    return transformers.Qwen3MoeForCausalLM(config).eval().requires_grad_(False)


MODELS = {"full attention": qwen3, "sliding windows": gemma3, "experts": experts}


def prompt(length: int, sequences: int = 1) -> torch.Tensor:
    return torch.randint(1, 128, (sequences, length), generator=torch.Generator().manual_seed(length))


def run(model: Any, ids: torch.Tensor, tokens: int = 16, **options: Any) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    options = {"do_sample": False, **options}
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, return_dict_in_generate=True,
        output_logits=True, **options,
    )  # fmt: skip
    return (out.sequences, *out.logits)


def static(model: Any, ids: torch.Tensor, tokens: int = 16, **options: Any) -> tuple[torch.Tensor, ...]:
    """Eager, with a cache of the size that graphs take."""
    length = -(-(ids.shape[1] + tokens) // 256) * 256
    config = model.config.get_text_config(decoder=True)
    cache = transformers.StaticCache(config=config, max_cache_len=length)
    return run(model, ids, tokens, disable_compile=True, **{decoding.CACHE_NAME: cache}, **options)


class Streamer(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.tokens.append(-1)


def assert_equal(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


@pytest.fixture(autouse=True)
def _recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(decoding, "StepGraph", RecordedStep)
    monkeypatch.setattr(decoding, "GRAPH_DEVICES", ("cpu",))
    with warnings.catch_warnings():
        warnings.simplefilter("error", HeadraceWarning)
        warnings.filterwarnings("error", ".*past_key_values", FutureWarning)  # transformers 5.24 has another name
        yield


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    return MODELS[request.param]()


@pytest.mark.slow
def test_tokens_and_logits_are_those_of_eager_steps(model: Any) -> None:
    """Also where a sliding window fills up on the way, and for prompts of other lengths in later calls."""
    graphs = headrace.decode_in_graphs(model)
    for length in (4, 12, 7, 300):
        assert_equal(run(model, prompt(length)), static_of(model, prompt(length)))
    assert graphs.replays > 40


def test_the_log_tells_the_parts_of_a_first_call(caplog: pytest.LogCaptureFixture) -> None:
    model = qwen3()
    headrace.decode_in_graphs(model)
    with caplog.at_level("INFO", "headrace"):
        for _ in range(2):
            model.generate(prompt(5), max_new_tokens=8, do_sample=False)
    told = [record.getMessage().split(": ")[0] for record in caplog.records]
    assert told == [f"{part} of [1, 1] tokens" for part in ("first eager forward", "capture of a forward")]


def static_of(model: Any, ids: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
    """:func:`static` of a model whose ``generate`` is set aside: its own, not the one with graphs."""
    ours = vars(model).pop("generate")
    try:
        return static(model, ids, **options)
    finally:
        model.generate = ours


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True, "temperature": 0.7, "top_k": 20},
        {"num_return_sequences": 3, "do_sample": True},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
        {"logits_processor": LogitsProcessorList([lambda ids, scores: scores.flip(-1)])},
        {"stopping_criteria": StoppingCriteriaList([lambda ids, scores: torch.ones(len(ids)) * ids.shape[1] > 9])},
        {"eos_token_id": [3, 5, 7, 11]},
        {"generation_config": GenerationConfig(do_sample=True, top_p=0.8, pad_token_id=0)},
    ],
    ids=lambda options: " ".join(options),
)
def test_options_of_generate_keep_working(options: dict[str, Any]) -> None:
    model = qwen3()
    graphs = headrace.decode_in_graphs(model)
    assert_equal(run(model, prompt(5), **options), static_of(model, prompt(5), **options))
    assert graphs.replays > 0


def test_several_sequences_with_padding() -> None:
    model, ids = qwen3(), prompt(8, 3)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    graphs = headrace.decode_in_graphs(model)
    found = [vars(model)["generate"](ids, attention_mask=mask, max_new_tokens=9) for _ in range(2)]
    graphs.remove()
    cache = transformers.StaticCache(config=model.config, max_cache_len=256)
    cache_of_its_own: dict[str, Any] = {decoding.CACHE_NAME: cache, "disable_compile": True}
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=9, **cache_of_its_own)
    assert all(torch.equal(each, expected) for each in found)
    assert graphs.replays > 0


def test_a_streamer_gets_every_token() -> None:
    model, streamer = qwen3(), Streamer()
    headrace.decode_in_graphs(model)
    out = model.generate(prompt(5), max_new_tokens=9, streamer=streamer)
    assert streamer.tokens == [*out[0].tolist(), -1]


@pytest.mark.parametrize("where", ["argument", "configuration"])
@pytest.mark.parametrize("name", ["dynamic", "hybrid"])
def test_a_growing_cache_by_name_is_replaced(name: str, where: str) -> None:
    """Files of Gemma 2 name one, for which transformers makes a growing one since 4.56."""
    model = gemma3()
    expected = static(model, prompt(7))
    options = {"cache_implementation": name} if where == "argument" else {}
    if where == "configuration":
        model.generation_config.cache_implementation = name
    graphs = headrace.decode_in_graphs(model)
    assert_equal(run(model, prompt(7), **options), expected)
    assert graphs.replays > 0


def test_chunks_of_a_prompt_are_no_steps(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    """They run eagerly in every call, where the host may wait; the same tokens as in eager calls."""
    graphs = headrace.decode_in_graphs(model)
    with caplog.at_level("INFO", "headrace"):
        for length in (8, 13, 12, 8, 13):
            found = run(model, prompt(length), prefill_chunk_size=4)
            assert_equal(found, static_of(model, prompt(length), prefill_chunk_size=4))
            with suppress(RuntimeError):  # not every transformers takes embeddings in chunks
                model.generate(inputs_embeds=torch.ones(1, length, 32), max_new_tokens=1, prefill_chunk_size=4)
    assert graphs.replays > 50
    assert all(" of [1, 1] tokens" in record.getMessage() for record in caplog.records)


def test_a_second_call_replays_what_the_first_has_captured() -> None:
    model = qwen3()
    graphs = headrace.decode_in_graphs(model)
    model.generate(prompt(5), max_new_tokens=9)
    assert graphs.replays == 7  # the prompt gives the first token, the warm-up the second
    model.generate(prompt(6), max_new_tokens=9)
    assert graphs.replays == 7 + 8


@pytest.mark.parametrize("how", [{}, {"generation_config": None}], ids=["argument", "configuration"])
def test_a_returned_cache_is_the_callers(how: dict[str, Any]) -> None:
    """A later call must not write into it."""
    model = qwen3()
    headrace.decode_in_graphs(model)
    said = {"return_dict_in_generate": True}
    said = {"generation_config": GenerationConfig(**said, pad_token_id=0)} if how else said
    first = model.generate(prompt(5), max_new_tokens=9, **said)
    cache = getattr(first, decoding.CACHE_NAME)
    kept = cache.layers[0].keys.clone()
    model.generate(prompt(6), max_new_tokens=9)
    assert torch.equal(cache.layers[0].keys, kept)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_beams": 2}, "beam search is not captured"),
        ({"prompt_lookup_num_tokens": 2}, "assisted generation is not captured"),
        ({"cache_implementation": "static"}, "cache_implementation ask for a cache of their own"),
        ({"use_cache": False}, "use_cache=False"),
        ({"output_hidden_states": True}, "output_hidden_states"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_captured_runs_eagerly_and_says_why(options: dict[str, Any], reason: str) -> None:
    model = qwen3()
    expected = run(model, prompt(5), **options)
    graphs = headrace.decode_in_graphs(model)
    with pytest.warns(HeadraceWarning, match=f"generate runs eagerly, without CUDA graphs: .*{reason}"):
        assert_equal(run(model, prompt(5), **options), expected)
    assert_equal(run(model, prompt(5), **options), expected)  # and is silent the second time
    assert graphs.replays == 0


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Mamba", "Mamba2", "T5", "ALiBi", "index"])
def test_models_without_a_static_cache_run_eagerly(family: str) -> None:
    torch.manual_seed(0)
    configs = {
        "Mamba": (transformers.MambaForCausalLM, transformers.MambaConfig(
            vocab_size=128, hidden_size=32, state_size=4, num_hidden_layers=2, eos_token_id=None)),
        "T5": (transformers.T5ForConditionalGeneration, transformers.T5Config(
            vocab_size=128, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0,
            eos_token_id=None)),
        "Mamba2": (transformers.Mamba2ForCausalLM, transformers.Mamba2Config(
            vocab_size=128, hidden_size=32, state_size=4, num_heads=8, head_dim=8, n_groups=2, num_hidden_layers=2,
            eos_token_id=None)),
        "ALiBi": (transformers.FalconForCausalLM, transformers.FalconConfig(
            vocab_size=128, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True,
            eos_token_id=None)),
        "index": (transformers.DeepseekV32ForCausalLM, transformers.DeepseekV32Config(
            **{**SIZES, **LATENT}, index_n_heads=2, index_head_dim=16, index_topk=8)),
    }  # fmt: skip
    kind, config = configs[family]
    model = kind(config).eval().requires_grad_(False)
    expected = [run(model, prompt(length)) for length in (1, 5)]
    headrace.decode_in_graphs(model)
    with pytest.warns(HeadraceWarning, match="generate runs eagerly"):
        found = [run(model, prompt(length)) for length in (1, 5)]
    for each, logits in zip(found, expected, strict=True):
        assert_equal(each, logits)


@pytest.mark.parametrize("model", ["full attention", "sliding windows"], indirect=True)
def test_a_step_that_cannot_be_captured_runs_eagerly(model: Any) -> None:
    """It asks the device for a value; what Python has counted before that is taken back."""
    wait = model.model.layers[2].register_forward_hook(lambda module, args, out: out if out.sum().item() else None)
    expected = static(model, prompt(7))
    graphs = headrace.decode_in_graphs(model)
    with pytest.warns(HeadraceWarning, match="decoding step cannot be captured: operation not permitted"):
        assert_equal(run(model, prompt(7)), expected)
    wait.remove()
    assert graphs.replays == 0


def test_too_little_memory_for_graphs_is_said_with_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse = raising(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    model = qwen3()
    expected = static(model, prompt(7))
    headrace.decode_in_graphs(model)
    monkeypatch.setattr(decoding, "StepGraph", refuse)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 20, 1 << 30))
    with pytest.warns(HeadraceWarning, match=r"Tried to allocate 2.00 GiB \(1.00 MiB of device memory are free\)"):
        assert_equal(run(model, prompt(7)), expected)


@pytest.mark.slow
@pytest.mark.parametrize("streams", [False, True])
def test_a_cache_that_does_not_fit_is_said_and_the_call_runs_eagerly(
    monkeypatch: pytest.MonkeyPatch, streams: bool
) -> None:
    """Its memory is taken in the first forward; a streamer gets every token once."""

    refuse = raising(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    model = qwen3()
    expected = run(model, prompt(7))
    graphs = headrace.decode_in_graphs(model)
    streamer = Streamer() if streams else None
    with monkeypatch.context() as patch:
        patch.setattr(transformers.cache_utils.StaticLayer, "lazy_initialization", refuse)
        patch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 20, 1 << 30))
        with pytest.warns(HeadraceWarning, match=r"1 sequences with 256 tokens does not fit: .*2.00 GiB \(1.00 MiB of"):
            assert_equal(run(model, prompt(7), streamer=streamer), expected)
    assert graphs.replays == 0
    if streamer is not None:
        assert streamer.tokens == [*expected[0][0].tolist(), -1]
    run(model, prompt(7))
    assert graphs.replays > 0


def test_memory_that_runs_out_later_is_the_callers_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model, steps = qwen3(), iter(range(100))
    headrace.decode_in_graphs(model)

    def refuse(module: Any, args: Any) -> None:
        if next(steps) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")

    model.model.layers[2].register_forward_pre_hook(refuse)
    with pytest.raises(torch.OutOfMemoryError):
        run(model, prompt(7))


@pytest.mark.slow
def test_two_threads_that_generate_at_once() -> None:
    model = qwen3()
    expected = static(model, prompt(5)), static(model, prompt(6))
    headrace.decode_in_graphs(model)
    found: dict[int, list[torch.Tensor]] = {0: [], 1: []}

    def work(which: int) -> None:
        for _ in range(4):
            found[which].append(model.generate(prompt(5 + which), max_new_tokens=16))

    run_threads([partial(work, 0), partial(work, 1)], 120)
    for which in range(2):
        assert len(found[which]) == 4
        assert all(torch.equal(each, expected[which][0]) for each in found[which])


def test_calls_in_inference_mode_and_outside_share_no_cache() -> None:
    """Tensors made in inference mode cannot be written outside of it."""
    model = qwen3()
    headrace.decode_in_graphs(model)
    with torch.inference_mode():
        first = model.generate(prompt(5), max_new_tokens=9)
    assert torch.equal(model.generate(prompt(5), max_new_tokens=9), first)


@pytest.mark.slow
def test_remove_gives_generate_back_and_frees_the_cache() -> None:
    model = qwen3()
    before = dict(vars(model))
    graphs = headrace.decode_in_graphs(model)
    model.generate(prompt(5), max_new_tokens=9)
    cache = weakref.ref(graphs._cache)
    graphs.remove()
    graphs.remove()
    gc.collect()
    assert vars(model) == before
    assert cache() is None


def test_the_second_call_of_decode_in_graphs_replaces_the_first() -> None:
    model = qwen3()
    first, second = headrace.decode_in_graphs(model), headrace.decode_in_graphs(model, context=1000)
    model.generate(prompt(5), max_new_tokens=9)
    assert (first.replays, second.replays) == (0, 7)
    assert second._cache.layers[0].max_cache_len == 1024


@pytest.mark.slow
def test_removing_an_offload_removes_its_graphs() -> None:
    model = experts()
    expected = static(model, prompt(5))
    with headrace.offload(model, headrace.UVA(params=["mlp"])) as handle:
        headrace.decode_in_graphs(model)
        assert_equal(run(model, prompt(5)), expected)
        assert handle.plan.uva_bytes > 0
    assert "generate" not in vars(model)
    assert_equal(static(model, prompt(5)), expected)


def test_a_model_that_is_not_on_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "GRAPH_DEVICES", ("cuda",))
    with pytest.raises(OptionError, match="expected a model on a GPU, found one on cpu"):
        headrace.decode_in_graphs(qwen3())


def test_a_hook_of_the_user_runs_in_every_step_unless_it_is_meant_to_be_captured() -> None:
    model, calls = qwen3(), []
    model.model.layers[1].register_forward_hook(lambda *_: calls.append(1))
    graphs = headrace.decode_in_graphs(model, with_hooks=False)
    message = "model.layers.1 has a forward hook, whose Python code a replay does not run"
    with pytest.warns(HeadraceWarning, match=message):
        model.generate(prompt(5), max_new_tokens=9)
    assert (len(calls), graphs.replays) == (9, 0)
    graphs = headrace.decode_in_graphs(model)
    model.generate(prompt(5), max_new_tokens=9)
    assert (len(calls), graphs.replays) == (9 + 3, 7)


def test_hooks_of_an_offload_are_captured() -> None:
    model = qwen3()
    expected = static(model, prompt(5))
    with headrace.offload(model, headrace.UVA(params=["mlp"])):
        graphs = headrace.decode_in_graphs(model, with_hooks=False)
        assert_equal(run(model, prompt(5)), expected)
        assert graphs.replays > 0


def replace_weight(model: Any) -> None:
    layer = model.model.layers[1].mlp.up_proj
    layer.weight = torch.nn.Parameter(layer.weight * 2, requires_grad=False)


def set_data(model: Any) -> None:
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.data = weight.data * 2


def patch_class(model: Any) -> None:
    mlp = model.model.layers[1].mlp
    mlp.__class__ = type("Doubled", (type(mlp),), {"forward": lambda self, x: 2 * super(type(self), self).forward(x)})


def add_hook(model: Any) -> None:
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: 2 * output)


def write(model: Any) -> None:
    """Which a replay sees."""
    model.model.layers[1].mlp.up_proj.weight.mul_(2)


@pytest.mark.slow
@pytest.mark.parametrize("change", [replace_weight, set_data, patch_class, add_hook, write])
def test_a_model_that_is_changed_between_two_calls(change: Any) -> None:
    model = qwen3()
    graphs = headrace.decode_in_graphs(model)
    before = run_kept(model)
    change(model)
    replays = graphs.replays
    found = run_kept(model)
    assert graphs.replays > replays
    assert_equal(found, static_of(model, prompt(5))[1:])
    assert not torch.equal(found[0], before[0])


def run_kept(model: Any) -> tuple[torch.Tensor, ...]:
    """Logits of a call after which the graphs stay, since it returns no cache."""
    found: list[torch.Tensor] = []

    def note(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        found.append(scores.clone())
        return scores

    model.generate(
        prompt(5), max_new_tokens=16, do_sample=False, logits_processor=LogitsProcessorList([note]),
        attention_mask=torch.ones_like(prompt(5)),
    )  # fmt: skip
    return tuple(found)


class Shifted(transformers.Qwen3ForCausalLM):  # type: ignore[misc]
    """Makes a tensor for all steps of a text when it reads the prompt, as models of pictures and text do."""

    def forward(self, input_ids: torch.Tensor, **options: Any) -> Any:
        if input_ids.shape[1] > 1:
            self.shift = input_ids.float().mean(1, keepdim=True)[..., None]
        output = super().forward(input_ids, **options)
        output.logits = output.logits + self.shift
        return output


@pytest.mark.slow
def test_what_a_prompt_leaves_in_the_model_counts_for_its_own_text() -> None:
    model = qwen3()
    model.__class__ = Shifted
    graphs = headrace.decode_in_graphs(model)
    for length in (5, 9, 5):
        assert_equal(run(model, prompt(length)), static_of(model, prompt(length)))
    for _ in range(2):
        run_kept(model)
    assert graphs.replays > 40


class Counting(transformers.Qwen3ForCausalLM):  # type: ignore[misc]
    calls = 0

    def forward(self, *args: Any, **options: Any) -> Any:
        self.calls += 1
        output = super().forward(*args, **options)
        output.logits = output.logits * self.calls
        return output


def test_a_model_that_counts_its_steps_in_python_runs_eagerly() -> None:
    model = qwen3()
    model.__class__ = Counting
    expected = static(model, prompt(5))
    model.calls = 0
    graphs = headrace.decode_in_graphs(model)
    with pytest.warns(HeadraceWarning, match="its modules change in Python from step to step"):
        assert_equal(run(model, prompt(5)), expected)
    assert graphs.replays == 0


def test_a_cache_of_the_callers() -> None:
    model = qwen3()
    graphs = headrace.decode_in_graphs(model)
    own: dict[str, Any] = {decoding.CACHE_NAME: transformers.DynamicCache()}
    with pytest.warns(HeadraceWarning, match=f"{decoding.CACHE_NAME} or cache_implementation ask for a cache of their"):
        model.generate(prompt(5), max_new_tokens=9, **own)
    assert own[decoding.CACHE_NAME].get_seq_length() == 13
    assert graphs.replays == 0


def test_arguments_that_say_nothing() -> None:
    model = qwen3()
    graphs = headrace.decode_in_graphs(model)
    model.generate(prompt(5), max_new_tokens=9, **{decoding.CACHE_NAME: None}, disable_compile=False)
    assert graphs.replays == 7


@pytest.mark.parametrize("end", ["release", "_compare_model"])
def test_steps_are_dropped_when_the_device_has_done_their_replays(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    model = qwen3()
    graphs = decoding.DecodeGraphs(model, None, 0, False)
    graphs._steps._steps = {"a step": None}
    kept: list[int] = []
    monkeypatch.setattr(type(model), "device", property(lambda self: torch.device("cuda", 0)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: kept.append(len(graphs._steps._steps)))
    getattr(graphs, end)()
    assert kept == [1]
    assert graphs._steps._steps == {}


def test_a_step_is_captured_on_the_device_of_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another GPU is the current one, or was when the process captured for the first time."""
    current, captured = [torch.device("cuda", 0)], []

    @contextmanager
    def graph(made: Any, pool: Any, stream: torch.device, mode: str) -> Iterator[None]:
        captured.append((current[-1], stream))
        made.capture_begin()
        yield

    for name, value in {
        "device": entering(current),
        "graph": graph,
        "CUDAGraph": lambda: SimpleNamespace(pool=tuple, capture_begin=lambda: None),
        "memory_snapshot": list,
        "current_stream": lambda device: device,
        "stream": nullcontext,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(decoding, "_capture_stream", lambda device: device)
    devices = [torch.device("cuda", index) for index in (1, 0, 1)]
    for each in devices:
        StepGraph(lambda ids: ids, {"ids": prompt(1)}, each)
    assert captured == [(each, each) for each in devices]
