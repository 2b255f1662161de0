"""The promise: a pipeline of diffusers makes the same images within one budget, whoever loads adapters or compiles it.

Tiny pipelines with seeded weights; on a CPU, where copies and hooks are those of a GPU.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import pickle
import re
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import headrace
from checks import raising
from headrace.errors import (
    BudgetError,
    CheckpointError,
    HeadraceWarning,
    ModelChangedError,
    OptionError,
    OptionTypeError,
    StateError,
)
from headrace.model.inventory import take_inventory
from headrace.model.layers import find_stacks
from headrace.testing import assert_same_bits

if importlib.util.find_spec("diffusers") is None or importlib.util.find_spec("peft") is None:
    pytest.skip("diffusers and peft are not installed", allow_module_level=True)

import pipelines
from spills import staged

if TYPE_CHECKING:  # importing diffusers takes a second, also where this file is only collected
    from headrace.adapters.diffusers import PipelineHandle

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
    pytest.mark.filterwarnings("error::headrace.HeadraceWarning"),
]
STEP_MODELS = {"stable diffusion": "unet", "controlnet": "unet", "flux": "transformer", "wan": "transformer"}


@pytest.fixture(autouse=True)
def _compiled_anew() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def load(*args: Any, **options: Any) -> tuple[Any, PipelineHandle]:
    from headrace.adapters import diffusers

    return diffusers.load(*args, **options)


def weight_bytes(pipe: Any) -> int:
    from headrace.adapters.diffusers import Components

    return take_inventory(Components(pipe)).num_bytes


def offloaded(pipe: Any, share: float, **options: Any) -> PipelineHandle:
    """``pipe`` within ``share`` of its weights."""
    budget = int(share * weight_bytes(pipe))
    _, handle = load(pipe, budget, **options)
    assert handle.plan.device_bytes <= budget
    return handle


def moved_by(handle: PipelineHandle, run: Callable[[], torch.Tensor], expected: torch.Tensor) -> tuple[int, int]:
    """Bytes moved and units missed in a call that makes ``expected``."""
    before = handle.stats()
    assert_same_bits(run(), expected)
    after = handle.stats()
    assert handle.stats().notes == (), "nothing was promoted"
    return after.bytes_moved - before.bytes_moved, after.misses - before.misses


# -- one budget ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.25, 0.5])
@pytest.mark.parametrize("name", pipelines.CASES)
def test_the_same_images_in_one_budget(name: str, share: float) -> None:
    """And the second call knows the first: every component's first units come during the one before."""
    pipe = pipelines.build(name)
    pipeline_class, expected = type(pipe), pipelines.call(pipe)
    handle = offloaded(pipe, share)
    first, _ = moved_by(handle, lambda: pipelines.call(pipe), expected)
    second, missed = moved_by(handle, lambda: pipelines.call(pipe), expected)
    assert first > 0
    assert second > 0
    assert missed == 0
    assert isinstance(pipe, pipeline_class)
    handle.remove()
    assert type(pipe) is pipeline_class
    assert_same_bits(pipelines.call(pipe), expected)


@pytest.mark.parametrize("name", pipelines.CASES)
def test_residents_are_of_what_every_step_runs(name: str) -> None:
    """Of what a call runs once, only tensors stay that are too small to move, and those no unit can hold."""
    from headrace.adapters.diffusers import modules_of

    pipe = pipelines.build(name)
    handle = offloaded(pipe, 0.6)
    once = {part for part in modules_of(pipe) if not part.startswith(("unet", "transformer", "controlnet"))}
    kept = {"once": 0, "steps": 0}
    for tensor, num_bytes in handle.plan.resident.items():
        if num_bytes >= 2**16:
            kept["once" if tensor.split(".")[0] in once else "steps"] += num_bytes
    assert kept["once"] == 0
    assert kept["steps"] > 0.15 * weight_bytes(pipe)


@pytest.mark.parametrize("name", ["stable diffusion", "wan"])
def test_other_calls_than_the_last_are_right(name: str) -> None:
    """More and fewer steps, other sizes, batches, guidance, no decoding, text encoded by hand."""
    pipe, twin = pipelines.build(name), pipelines.build(name)
    handle = offloaded(pipe, 0.3)
    calls: list[dict[str, Any]] = [
        {}, {"num_inference_steps": 7}, {"num_inference_steps": 1}, {"output_type": "latent"}, {"width": 48},
        {"prompt": ["a", "b c"], "negative_prompt": ["d", "e"]}, {"guidance_scale": 1.0}, {},
    ]  # fmt: skip
    for call in calls:
        moved, _ = moved_by(handle, lambda call=call: pipelines.call(pipe, **call), pipelines.call(twin, **call))  # type: ignore[misc]
        assert moved > 0
    device = torch.device("cpu")
    mine, same = (p.encode_prompt("g h", device=device, **_encoding(name)) for p in (pipe, twin))
    assert_same_bits(list(mine), list(same))
    # The middle of a call may end it.
    with pytest.raises(KeyboardInterrupt):
        pipelines.call(pipe, callback_on_step_end=raising(KeyboardInterrupt))
    assert_same_bits(pipelines.call(pipe), pipelines.call(twin))


def _encoding(name: str) -> dict[str, Any]:
    if name == "wan":
        return {"max_sequence_length": 16}
    return {"num_images_per_prompt": 1, "do_classifier_free_guidance": True}


def test_decoding_in_tiles_and_slices() -> None:
    pipe = pipelines.build("stable diffusion")
    pipe.vae.enable_tiling()
    pipe.vae.tile_latent_min_size, pipe.vae.tile_sample_min_size = 16, 32
    large = {"height": 64, "width": 48, "num_inference_steps": 1}
    expected = pipelines.call(pipe, **large)
    handle = offloaded(pipe, 0.3)
    for _ in range(2):
        _, missed = moved_by(handle, lambda: pipelines.call(pipe, **large), expected)
    assert missed == 0
    pipe.vae.disable_tiling()
    pipe.vae.enable_slicing()
    twin = pipelines.build("stable diffusion")
    twin.vae.enable_slicing()
    assert_same_bits(pipelines.call(pipe, prompt=["a", "b"], negative_prompt=["c", "d"]),
                     pipelines.call(twin, prompt=["a", "b"], negative_prompt=["c", "d"]))  # fmt: skip


def test_slots_that_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """HEADRACE_DEBUG poisons slots between runs, and compares what arrives."""
    monkeypatch.setenv("HEADRACE_DEBUG", "1")
    pipe = pipelines.build("controlnet")
    expected = pipelines.call(pipe)
    handle = offloaded(pipe, 0.3)
    for _ in range(2):
        moved, _ = moved_by(handle, lambda: pipelines.call(pipe), expected)
        assert moved > 0


def test_textual_inversion() -> None:
    pipe, twin = pipelines.build("stable diffusion"), pipelines.build("stable diffusion")
    handle = offloaded(pipe, 0.4)
    for p in (pipe, twin):
        p.load_textual_inversion({"weir": torch.ones(1, 128)}, token="weir")
    moved, _ = moved_by(handle, lambda: pipelines.call(pipe, prompt="a weir"), pipelines.call(twin, prompt="a weir"))
    assert moved > 0
    assert handle.plan.weight_bytes == weight_bytes(twin)


def test_progress_goes_on(capfd: pytest.CaptureFixture[str]) -> None:
    pipe = pipelines.build("flux")
    pipe.set_progress_bar_config(disable=False)
    offloaded(pipe, 0.4)
    pipelines.call(pipe)
    assert "3/3" in capfd.readouterr().err


def test_a_budget_for_everything_offloads_nothing() -> None:
    pipe = pipelines.build("flux")
    expected = pipelines.call(pipe)
    with pytest.warns(HeadraceWarning, match="fit the budget"):
        _, handle = load(pipe, "1GiB")
    assert handle.plan.offloaded_bytes == 0
    assert_same_bits(pipelines.call(pipe), expected)


def test_models_called_text_encoder_2_and_3_are_no_layers_of_one() -> None:
    parts = torch.nn.Module()
    parts.text_encoder_2, parts.text_encoder_3 = pipelines.clip_text(1), pipelines.t5("T5", 2)
    assert set(find_stacks(take_inventory(parts))) == {"text_encoder_2.encoder.layers", "text_encoder_3.encoder.block"}


# -- compiled ------------------------------------------------------------------------------------------------------


def _compile(pipe: Any, part: str, how: str, backend: str) -> None:
    model = getattr(pipe, part)
    if how == "wrapped":
        setattr(pipe, part, torch.compile(model, backend=backend))
    elif how == "in place":
        model.compile(backend=backend)
    else:
        model.compile_repeated_blocks(backend=backend, fullgraph=True)


@cache
def compiled_and_resident(name: str, how: str) -> torch.Tensor:
    """What a pipeline makes that is compiled and never offloaded."""
    pipe = pipelines.build(name)
    _compile(pipe, STEP_MODELS[name], how, "eager")
    return pipelines.call(pipe)


@pytest.mark.parametrize("first", ["compiled", "offloaded"])
@pytest.mark.parametrize(("name", "how"), [("flux", "wrapped"), ("wan", "in place"), ("flux", "regional")])
def test_compiled(name: str, how: str, first: str) -> None:
    pipe, expected = pipelines.build(name), compiled_and_resident(name, how)
    if first == "compiled":
        _compile(pipe, STEP_MODELS[name], how, "eager")
        pipelines.call(pipe)
    handle = offloaded(pipe, 0.4)
    if first == "offloaded":
        _compile(pipe, STEP_MODELS[name], how, "eager")
    for _ in range(2):
        moved, missed = moved_by(handle, lambda: pipelines.call(pipe), expected)
        assert moved > 0
    assert missed == 0


# -- adapters ------------------------------------------------------------------------------------------------------


def lora(name: str, seed: int, rank: int = 4) -> dict[str, torch.Tensor]:
    """A LoRA for the pipeline ``name``, in the format of diffusers."""
    from peft import LoraConfig, get_peft_model_state_dict

    part = STEP_MODELS[name]
    model = getattr(pipelines.build(name), part)
    model.add_adapter(LoraConfig(r=rank, target_modules=["to_q", "to_v", "to_out.0"]), adapter_name="x")
    generator = torch.Generator().manual_seed(seed)
    state = get_peft_model_state_dict(model, adapter_name="x")
    return {f"{part}.{key}": torch.randn(value.shape, generator=generator) / 9 for key, value in state.items()}


LORA_STEPS: list[tuple[str, Callable[[Any, str], Any]]] = [
    ("one", lambda pipe, name: pipe.load_lora_weights(lora(name, 1), adapter_name="one")),
    ("two", lambda pipe, name: (pipe.load_lora_weights(lora(name, 2), adapter_name="two"), pipe.set_adapters("two"))),
    ("both", lambda pipe, name: pipe.set_adapters(["one", "two"], [0.5, 0.7])),
    ("off", lambda pipe, name: pipe.disable_lora()),
    ("on", lambda pipe, name: pipe.enable_lora()),
    ("fused", lambda pipe, name: pipe.fuse_lora()),
    ("unfused", lambda pipe, name: pipe.unfuse_lora()),
    ("deleted", lambda pipe, name: pipe.delete_adapters("one")),
    ("unloaded", lambda pipe, name: pipe.unload_lora_weights()),
]


@pytest.mark.parametrize(("name", "loaded_before"), [("stable diffusion", 0), ("flux", 2), ("wan", 0)])
def test_lora(name: str, loaded_before: int) -> None:
    """Loaded before or after, switched, mixed, disabled and unloaded in one offload; merged and unmerged around it."""
    pipe, twin = pipelines.build(name), pipelines.build(name)
    for _, step in LORA_STEPS[:loaded_before]:
        step(pipe, name)
        step(twin, name)
    budget = int(0.4 * weight_bytes(pipe))
    _, handle = load(pipe, budget)
    session, in_plan = handle._session, weight_bytes(pipe)
    outputs = [pipelines.call(twin)]
    for what, step in LORA_STEPS[loaded_before:]:
        step(pipe, name)
        step(twin, name)
        outputs.append(pipelines.call(twin))
        moved, _ = moved_by(handle, lambda: pipelines.call(pipe), outputs[-1])
        assert moved > 0, what
        plan = handle.plan
        if what in ("fused", "unfused"):  # which write weights: a new plan, that counts the adapters in the budget
            assert plan.device_bytes <= budget
            assert handle._session is not session
            session, in_plan = handle._session, plan.weight_bytes
        adapters = plan.weight_bytes - in_plan
        assert handle._session is session, what
        assert plan.device_bytes <= budget + adapters
        assert plan.weight_bytes == max(in_plan, weight_bytes(twin)), "memory of planned adapters stays until remove()"
        assert not any("lora_" in tensor for tensor in plan.offloaded_names)
    changes = sum(not torch.equal(a, b) for a, b in pairwise(outputs))
    assert changes >= len(outputs) - 2, "unfusing may bring back the very bits"
    handle.remove()
    assert_same_bits(pipelines.call(pipe), outputs[-1])


@pytest.mark.parametrize("copies", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_and_pickles_are_refused(copies: Callable[[Any], Any]) -> None:
    pipe = pipelines.build("flux")
    expected = pipelines.call(pipe)
    _, handle = load(pipe, int(0.4 * weight_bytes(pipe)))
    with pytest.raises(StateError, match=r"offloaded FluxPipeline cannot be copied or pickled.*remove\(\) first"):
        copies(pipe)
    moved_by(handle, lambda: pipelines.call(pipe), expected)
    other = pipe.from_pipe(pipe)
    handle.remove()
    for each in (pipe, other):
        made = copies(each)
        assert_same_bits(pipelines.call(pickle.loads(made) if isinstance(made, bytes) else made), expected)


def test_an_adapter_of_one_component_is_counted_at_the_next_call() -> None:
    from peft import LoraConfig

    pipe, twin = pipelines.build("flux"), pipelines.build("flux")
    budget = int(0.4 * weight_bytes(pipe))
    _, handle = load(pipe, budget)
    for p in (pipe, twin):
        torch.manual_seed(5)
        p.transformer.add_adapter(LoraConfig(r=64, init_lora_weights=False, target_modules=["to_q", "to_v"]))
    moved, _ = moved_by(handle, lambda: pipelines.call(pipe), pipelines.call(twin))
    assert moved > 0
    assert handle.plan.weight_bytes == weight_bytes(twin)
    assert budget < handle.plan.device_bytes <= budget + weight_bytes(twin) - weight_bytes(pipelines.build("flux"))


@pytest.mark.parametrize("in_files", [False, True])
def test_adapters_take_no_load(in_files: bool, tmp_path: Path) -> None:
    """Of the largest size there is room for here: a second at most beyond what the resident pipeline takes."""
    pipe, twin = pipelines.build("flux"), pipelines.build("flux")
    pipe.save_pretrained(tmp_path)
    policy = headrace.Budget(handle_least(pipe), mode="disk" if in_files else None)
    _, handle = load(pipe, policy, checkpoint=tmp_path if in_files else None)
    session, state = handle._session, lora("flux", 1, rank=512)
    assert sum(tensor.nbytes for tensor in state.values()) > weight_bytes(twin) / 4
    expected = {"none": pipelines.call(twin)}
    for round_ in range(2):
        took = []
        for p in (twin, pipe):
            start = time.perf_counter()
            p.load_lora_weights(state, adapter_name="one")
            p.set_adapters("one", 0.5)
            took.append(time.perf_counter() - start)
        assert took[1] < 1 + 2 * took[0], round_
        expected["one"] = pipelines.call(twin)
        assert moved_by(handle, lambda: pipelines.call(pipe), expected["one"])[0] > 0
        for p in (twin, pipe):
            start = time.perf_counter()
            p.unload_lora_weights()
            took.append(time.perf_counter() - start)
        assert took[3] < 1 + 2 * took[2], round_
        assert moved_by(handle, lambda: pipelines.call(pipe), expected["none"])[0] > 0
        assert handle.plan.weight_bytes == weight_bytes(twin)
    assert handle._session is session
    assert handle.plan.reads_files is in_files
    assert not torch.equal(expected["none"], expected["one"])


def test_loading_an_adapter_reads_no_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """diffusers and peft ask for a state_dict several times: of files or codes each would take seconds."""
    from headrace.runtime.outside_access import StateGuard

    pipe, twin = pipelines.build("flux"), pipelines.build("flux")
    _, handle = load(pipe, headrace.Prefetch(params=[headrace.config.ALL_MODEL_PARAMS]))
    weight, expected = twin.transformer.proj_out.weight.clone(), pipelines.call(twin)
    with monkeypatch.context() as patched:
        patched.setattr(StateGuard, "_bytes", lambda *_: pytest.fail("a weight was read"))
        for p in (twin, pipe):
            p.load_lora_weights(lora("flux", 1), adapter_name="one")
            p.load_lora_weights(lora("flux", 2), adapter_name="one", hotswap=True)
    made = pipelines.call(twin)
    assert not torch.equal(made, expected)
    assert moved_by(handle, lambda: pipelines.call(pipe), made)[0] > 0
    assert torch.equal(pipe.transformer.state_dict()["proj_out.weight"], weight)


def test_an_exchanged_weight_is_planned_anew() -> None:
    """As control adapters of FLUX exchange an embedding for a wider one."""
    pipe, twin = pipelines.build("flux"), pipelines.build("flux")
    _, handle = load(pipe, headrace.Prefetch(1, 1, 1, params=[headrace.config.ALL_MODEL_PARAMS]))
    session, expected = handle._session, pipelines.call(twin)
    for p in (pipe, twin):
        with torch.random.fork_rng():
            torch.manual_seed(1)
            p.transformer.transformer_blocks[1].ff.net[2] = torch.nn.Linear(512, 128)
    changed = pipelines.call(twin)
    assert not torch.equal(changed, expected)
    assert moved_by(handle, lambda: pipelines.call(pipe), changed)[0] > 0
    assert handle._session is not session
    assert "transformer.transformer_blocks.1.ff.net.2.weight" in handle.plan.offloaded_names


@pytest.mark.parametrize("where", ["start", "_offloaded_class"])
def test_an_interrupt_leaves_a_pipeline_that_is_not_offloaded(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.adapters import diffusers as adapter

    pipe = pipelines.build("flux")
    pipeline_class, expected, done = type(pipe), pipelines.call(pipe), getattr(adapter, where)

    def interrupted(*args: Any, **options: Any) -> Any:
        done(*args, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(adapter, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            load(pipe, "12MiB")
    assert type(pipe) is pipeline_class
    assert_same_bits(pipelines.call(pipe), expected)
    moved, _ = moved_by(offloaded(pipe, 0.4), lambda: pipelines.call(pipe), expected)
    assert moved > 0


def handle_least(pipe: Any) -> int:
    with pytest.raises(BudgetError) as caught:
        load(pipe, 1)
    return caught.value.minimum_bytes


def test_an_ip_adapter(tmp_path: Path) -> None:
    """Which adds an image encoder to the pipeline, and layers to the UNet."""
    pipe, twin = pipelines.build("stable diffusion"), pipelines.build("stable diffusion")
    budget = int(0.5 * weight_bytes(pipe))
    _, handle = load(pipe, budget)
    state = pipelines.ip_adapter(twin.unet)
    image = torch.randn(2, 1, 1, 32, generator=torch.Generator().manual_seed(5))
    made = []
    for p in (pipe, twin):
        p.load_ip_adapter(state, subfolder="", weight_name="", image_encoder_folder=None)
        p.set_ip_adapter_scale(0.8)
        made.append(pipelines.call(p, ip_adapter_image_embeds=[image]))
    assert_same_bits(*made)
    assert handle.stats().bytes_moved > 0
    assert handle.plan.weight_bytes == weight_bytes(twin)
    assert handle.plan.device_bytes <= budget
    for p in (pipe, twin):
        p.unload_ip_adapter()
    assert_same_bits(pipelines.call(pipe), pipelines.call(twin))


@pytest.mark.parametrize("policy", ["plan", "budget"])
def test_a_change_that_has_no_plan_leaves_nothing_that_runs_silently(policy: str) -> None:
    """A finished plan is for the weights of before, and a budget may be too small for those of then."""
    pipe, twin = pipelines.build("stable diffusion"), pipelines.build("stable diffusion")
    given: Any = handle_least(pipe)
    if policy == "plan":
        with offloaded(pipe, 0.5) as before:
            given = before.plan
    _, handle = load(pipe, given)
    state = pipelines.ip_adapter(twin.unet)
    if policy == "budget":
        state["image_proj"] |= {"proj.weight": torch.ones(512, 8192)}
    added = {"subfolder": "", "weight_name": "", "image_encoder_folder": None}
    with pytest.raises(OptionError) as caught:
        pipe.load_ip_adapter(state, **added)
    fix = r"load_ip_adapter\(\) has changed the pipeline.* not offloaded.*load\(pipe, \.\.\.\) again.*handle\.remove"
    assert re.match(f"headrace: {fix}", caught.value.__notes__[0])
    latents, text = torch.ones(1, 4, 4, 4), torch.zeros(1, 4, dtype=torch.long)
    for run in (
        lambda: pipelines.call(pipe), lambda: pipe.vae.decode(latents), lambda: pipe.text_encoder(text),
        handle.stats, lambda: handle.plan,
    ):  # fmt: skip
        with pytest.raises(StateError, match=fix):
            run()
    assert "not offloaded" in repr(handle)
    # What undoes the change has the offload back, and so has a larger budget after it.
    if policy == "budget":
        pipe.unload_ip_adapter()
        assert moved_by(handle, lambda: pipelines.call(pipe), pipelines.call(twin))[0] > 0
        with pytest.raises(BudgetError):
            pipe.load_ip_adapter(state, **added)
    twin.load_ip_adapter(state, **added)
    image = torch.randn(2, 1, 1, state["image_proj"]["proj.weight"].shape[1])
    expected = pipelines.call(twin, ip_adapter_image_embeds=[image])
    again = offloaded(pipe, 0.7)
    assert moved_by(again, lambda: pipelines.call(pipe, ip_adapter_image_embeds=[image]), expected)[0] > 0
    again.remove()
    assert type(pipe) is type(twin)
    assert_same_bits(pipelines.call(pipe, ip_adapter_image_embeds=[image]), expected)


def test_a_pipeline_that_could_not_be_offloaded_again_runs_after_remove() -> None:
    pipe, twin = pipelines.build("flux"), pipelines.build("flux")
    with offloaded(pipe, 0.4) as before:
        plan = before.plan
    _, handle = load(pipe, plan)
    for p in (pipe, twin):
        p.load_lora_weights(lora("flux", 1), adapter_name="one")
    twin.fuse_lora()
    with pytest.raises(OptionError, match="another model"):
        pipe.fuse_lora()
    with pytest.raises(StateError, match=r"fuse_lora\(\) has changed the pipeline"):
        pipelines.call(pipe)
    handle.remove()
    assert_same_bits(pipelines.call(pipe), pipelines.call(twin))


# -- folders -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "mode"), [("stable diffusion", "disk"), ("flux", "cpu"), ("wan", None)])
def test_a_folder(name: str, mode: Any, tmp_path: Path) -> None:
    from diffusers import DiffusionPipeline

    # Products in 16 bits are the same wherever a weight lies; a mapped file has it at any address.
    options: dict[str, Any] = {"dtype": torch.bfloat16}
    pipelines.build(name).save_pretrained(tmp_path / "float32")
    twin = DiffusionPipeline.from_pretrained(tmp_path / "float32", **options)
    twin.save_pretrained(tmp_path / "folder")
    twin = DiffusionPipeline.from_pretrained(tmp_path / "folder", **options)
    twin.set_progress_bar_config(disable=True)
    policy = headrace.Budget(int(0.6 * weight_bytes(twin)), mode=mode)
    pipe, handle = load(tmp_path / "folder", policy, **options)
    pipe.set_progress_bar_config(disable=True)
    assert handle.plan.mode == ("cpu" if mode == "cpu" else "disk")
    for _ in range(2):
        moved, _ = moved_by(handle, lambda: pipelines.call(pipe), pipelines.call(twin))
        assert moved > 0
    for p in (pipe, twin):
        p.load_lora_weights(lora(name, 1), adapter_name="one")
    moved, _ = moved_by(handle, lambda: pipelines.call(pipe), pipelines.call(twin))
    assert moved > 0
    if mode != "cpu":
        with pytest.raises(StateError, match=r"fuse_lora\(\) writes weights, and some are in files"):
            pipe.fuse_lora()
        assert_same_bits(pipelines.call(pipe), pipelines.call(twin))


def test_variants_side_by_side_in_a_folder(tmp_path: Path) -> None:
    from diffusers import DiffusionPipeline

    bf16: dict[str, Any] = {"dtype": torch.bfloat16}  # rounds alike at any address of a mapped file
    pipe = pipelines.build("stable diffusion").to(torch.bfloat16)
    pipe.save_pretrained(tmp_path)
    for part in (pipe.unet, pipe.vae, pipe.text_encoder):
        with torch.no_grad():
            for weight in part.parameters():
                weight.mul_(0.5)
    pipe.save_pretrained(tmp_path, variant="other", max_shard_size="1MB")
    images = []
    for chosen in ({}, {"variant": "other"}):
        twin = DiffusionPipeline.from_pretrained(tmp_path, **bf16, **chosen)
        twin.set_progress_bar_config(disable=True)
        images.append(pipelines.call(twin))
        pipe, handle = load(tmp_path, headrace.Budget(int(0.3 * weight_bytes(twin)), mode="disk"), **bf16, **chosen)
        pipe.set_progress_bar_config(disable=True)
        moved, _ = moved_by(handle, lambda pipe=pipe: pipelines.call(pipe), images[-1])
        assert moved > 0
        assert {entry.storage.split(".")[0] for unit in handle.plan.units for entry in unit.entries} >= {"unet", "vae"}
    assert not torch.equal(*images)


def test_a_component_of_the_caller_is_not_that_of_the_folder(tmp_path: Path) -> None:
    pipe = pipelines.build("stable diffusion")
    pipe.save_pretrained(tmp_path)
    for weight in pipe.text_encoder.parameters():
        weight.data.mul_(0.5)
    expected, budget = pipelines.call(pipe), headrace.Budget(int(0.8 * weight_bytes(pipe)), mode="disk")
    loaded, handle = load(tmp_path, budget, text_encoder=pipe.text_encoder)
    loaded.set_progress_bar_config(disable=True)
    with handle:
        moved, _ = moved_by(handle, lambda: pipelines.call(loaded), expected)
    assert moved > 0


def test_coded_units() -> None:
    twin, pipe = (pipelines.build("flux").to(torch.bfloat16) for _ in range(2))
    policy = headrace.Budget(int(0.5 * weight_bytes(twin)), codec="exp3", params=[headrace.config.ALL_MODEL_PARAMS])
    _, handle = load(pipe, policy)
    for _ in range(2):
        moved, _ = moved_by(handle, lambda: pipelines.call(pipe), pipelines.call(twin))
        assert moved > 0
    assert "exp3" in {unit.store for unit in handle.plan.units}


def test_a_pipeline_with_its_folder_reads_it(tmp_path: Path) -> None:
    pipe = pipelines.build("flux")
    expected = pipelines.call(pipe)
    pipe.save_pretrained(tmp_path)
    policy = headrace.Budget(int(0.4 * weight_bytes(pipe)), mode="disk")
    _, handle = load(pipe, policy, checkpoint=tmp_path)
    moved, _ = moved_by(handle, lambda: pipelines.call(pipe), expected)
    assert moved > 0
    assert handle.plan.reads_files


def test_what_host_memory_has_no_room_for_stays_in_files(tmp_path: Path) -> None:
    """As a budget on a GPU plans it: some units of every component in host memory, the others in the files."""
    pipe = pipelines.build("flux")
    expected = pipelines.call(pipe)
    pipe.save_pretrained(tmp_path)
    with offloaded(pipe, 0.4) as handle:
        plan = staged(handle.plan, *range(0, len(handle.plan.units), 3))
    _, handle = load(pipe, plan, checkpoint=tmp_path)
    for _ in range(2):
        moved, missed = moved_by(handle, lambda: pipelines.call(pipe), expected)
        assert moved > 0
    assert missed == 0
    assert {name for name, size in handle.plan.store_bytes.items() if size} >= {"cpu", "disk"}


# -- refused -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda pipe: pipe.to("cpu"), r"to\(\) would move components"),
        (lambda pipe: pipe.enable_model_cpu_offload(), r"enable_model_cpu_offload\(\) would move"),
        (lambda pipe: pipe.enable_sequential_cpu_offload(), r"enable_sequential_cpu_offload\(\) would move"),
        (lambda pipe: pipe.enable_group_offload(torch.device("cpu")), r"enable_group_offload\(\) would move"),
        (lambda pipe: load(pipe, "9MiB"), "is offloaded already"),
        (lambda pipe: headrace.offload(pipe.unet, "9MiB"), "is offloaded already"),
    ],
    ids=["to", "model offload", "sequential offload", "group offload", "twice", "a part"],
)
def test_what_else_would_move_it(call: Callable[[Any], Any], message: str) -> None:
    pipe = pipelines.build("stable diffusion")
    expected = pipelines.call(pipe)
    handle = offloaded(pipe, 0.5)
    with pytest.raises(StateError, match=message) as caught:
        call(pipe)
    assert "remove()" in str(caught.value)
    moved, _ = moved_by(handle, lambda: pipelines.call(pipe), expected)
    assert moved > 0


def _group(pipe: Any) -> None:
    device = torch.device("cpu")
    pipe.unet.enable_group_offload(device, device, offload_type="leaf_level")


def test_another_pipeline_of_the_same_components() -> None:
    """``from_pipe`` makes one that runs them by hand."""
    pipe, twin = pipelines.build("stable diffusion"), pipelines.build("stable diffusion")
    handle = offloaded(pipe, 0.4)
    other, same = (type(p).from_pipe(p, dtype=torch.float32) for p in (pipe, twin))
    for p in (other, same):
        p.set_progress_bar_config(disable=True)
    moved, _ = moved_by(handle, lambda: pipelines.call(other), pipelines.call(same))
    assert moved > 0
    assert_same_bits(pipelines.call(pipe), pipelines.call(twin))


def test_what_moves_it_already() -> None:
    pipe = pipelines.build("stable diffusion")
    _group(pipe)
    with pytest.raises(StateError, match=r"unet.* is moved by diffusers' group offloading: expected a pipeline"):
        load(pipe, "9MiB")
    pipe = pipelines.build("stable diffusion")
    pipe.enable_sequential_cpu_offload(device="cpu")
    with pytest.raises(StateError, match=r"is moved by accelerate .*remove_all_hooks"):
        load(pipe, "9MiB")


def test_what_moves_a_component_from_then_on() -> None:
    pipe = pipelines.build("stable diffusion")
    offloaded(pipe, 0.5)
    _group(pipe)
    with pytest.raises(StateError, match=r"unet.* is moved by diffusers' group offloading"):
        pipelines.call(pipe)


def _cast_at_use(model: Any) -> None:
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)


def test_weights_that_hooks_would_cast_from_then_on() -> None:
    """Refused before the first one, also of residents, so that outputs stay what they were."""
    pipe = pipelines.build("stable diffusion")
    expected = pipelines.call(pipe)
    handle = offloaded(pipe, 0.8)
    for part in (pipe.unet, pipe.vae):
        with pytest.raises(ModelChangedError, match=r"would change .*handle\.remove\(\)"):
            _cast_at_use(part)
        assert {parameter.dtype for parameter in part.parameters()} == {torch.float32}
        with pytest.raises(ModelChangedError, match=r"would change .*handle\.remove\(\)"):  # in the middle of a call
            pipelines.call(pipe, callback_on_step_end=lambda *_, part=part: _cast_at_use(part))
        assert {parameter.dtype for parameter in part.parameters()} == {torch.float32}
    moved, _ = moved_by(handle, lambda: pipelines.call(pipe), expected)
    assert moved > 0
    handle.remove()
    assert_same_bits(pipelines.call(pipe), expected)


def test_weights_that_hooks_move_already() -> None:
    """The fix of the error, taken by its word, works."""
    pipe, fresh = pipelines.build("stable diffusion"), pipelines.build("stable diffusion")
    _group(pipe)
    match = r"module '[\w.]+' \(\w+\): .* moved by diffusers \(group offloading\); build or load it anew without"
    with pytest.raises(OptionError, match=match):
        headrace.offload(pipe.unet, "4MiB")
    pipe.register_modules(unet=fresh.unet)
    expected = pipelines.call(pipe)
    moved, _ = moved_by(offloaded(pipe, 0.5), lambda: pipelines.call(pipe), expected)
    assert moved > 0


def test_a_component_that_was_exchanged() -> None:
    pipe = pipelines.build("stable diffusion")
    handle = offloaded(pipe, 0.5)
    mine, pipe.unet = pipe.unet, pipelines.unet()
    with pytest.raises(StateError, match=r"unet of the pipeline was replaced.*handle\.remove\(\)"):
        pipelines.call(pipe)
    pipe.unet = mine
    moved, _ = moved_by(handle, lambda: pipelines.call(pipe), pipelines.call(pipelines.build("stable diffusion")))
    assert moved > 0


def test_a_vae_that_a_call_would_cast() -> None:
    """SDXL in float16: refused before its steps, not after them."""
    from diffusers import DDIMScheduler, StableDiffusionXLPipeline

    parts = dict.fromkeys(("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"))
    model, vae = pipelines.unet(), pipelines.autoencoder()
    pipe = StableDiffusionXLPipeline(vae=vae, unet=model, scheduler=DDIMScheduler(), **parts).to(torch.float16)
    with pytest.raises(OptionError, match=r"the VAE is in float16.*dtype=torch\.bfloat16, or"):
        load(pipe, "9MiB")
    vae.register_to_config(force_upcast=False)
    load(pipe, "3MiB")[1].remove()


def test_one_transformer_in_two_places() -> None:
    pipe, twin = pipelines.build("wan"), pipelines.build("wan")
    pipe.transformer_2, twin.transformer_2 = pipe.transformer, twin.transformer
    handle = offloaded(pipe, 0.4)
    for _ in range(2):
        moved, _ = moved_by(handle, lambda: pipelines.call(pipe), pipelines.call(twin))
        assert moved > 0


@pytest.mark.parametrize("harm", ["no JSON", "a list", "unknown class", "no part", "no config", "truncated weights"])
def test_malformed_folders(harm: str, tmp_path: Path) -> None:
    pipelines.build("stable diffusion").save_pretrained(tmp_path)
    index = tmp_path / "model_index.json"
    content = {
        "no JSON": "{", "a list": "[]", "unknown class": index.read_text().replace("UNet2D", "UNet9D"),
    }  # fmt: skip
    if harm in content:
        index.write_text(content[harm])
    elif harm == "no part":
        shutil.rmtree(tmp_path / "unet")
    elif harm == "no config":
        (tmp_path / "unet/config.json").write_text("null")
    else:
        os.truncate(next((tmp_path / "unet").glob("*.safetensors")), 100)
    with pytest.raises(CheckpointError, match=f"{tmp_path}: expected a pipeline that diffusers can load, found "):
        load(tmp_path, "9MiB")


def test_wrong_arguments(tmp_path: Path) -> None:
    pipe = pipelines.build("stable diffusion")
    with pytest.raises(OptionTypeError, match="expected a DiffusionPipeline or ModularPipeline, or a folder"):
        load(pipe.unet, "9MiB")
    with pytest.raises(OptionTypeError, match="found unknown arguments dtype"):
        load(pipe, "9MiB", dtype=torch.bfloat16)
    with pytest.raises(OptionError, match="device_map moves components itself"):
        load(tmp_path, "9MiB", device_map="balanced")
    with pytest.raises(CheckpointError, match="expected the folder of a diffusers pipeline"):
        load(tmp_path, "9MiB")
    with pytest.raises(BudgetError, match="is too small"):
        load(pipe, "1MiB")
    assert not hasattr(pipe, "_headrace")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe.to("cpu")
