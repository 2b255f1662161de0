"""The promise: what a pipeline's call takes beside the weights is counted without a GPU within a tenth, and planned."""

from __future__ import annotations

import inspect
import json
import re
import types
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import headrace
from commands import error_of, succeed
from headrace.checkpoint.metadata_cache import known_facts
from headrace.errors import BudgetError, OptionError, OptionTypeError
from headrace.plan_model import plan_model
from headrace.planning.request import PlanRequest

diffusers = pytest.importorskip("diffusers")
import pipelines  # noqa: E402
from headrace.adapters import pipeline_peaks  # noqa: E402
from headrace.adapters.diffusers import load  # noqa: E402

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "2026-11-23-offloaders-h200.jsonl"
_FLOW = {"patch_size": 1, "num_layers": 4, "num_attention_heads": 2, "joint_attention_dim": 64}
_VAE_2D = {
    "block_out_channels": (32, 64), "down_block_types": ("DownEncoderBlock2D",) * 2, "layers_per_block": 1,
    "up_block_types": ("UpDecoderBlock2D",) * 2, "latent_channels": 16, "shift_factor": 0.0,
}  # fmt: skip
_VAE_3D = {"base_dim": 16, "z_dim": 16, "dim_mult": [1, 2, 2, 2], "num_res_blocks": 1}


def parts_of(name: str) -> tuple[str, dict[str, Any]]:
    """The class of a tiny pipeline and its components, without text encoders."""
    steps: Any = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=name != "hunyuan")
    if name == "flux":
        axes = {"in_channels": 64, "attention_head_dim": 64, "num_single_layers": 4, "axes_dims_rope": (16, 24, 24)}
        transformer = diffusers.FluxTransformer2DModel(**_FLOW, **axes, pooled_projection_dim=32, guidance_embeds=True)
        return "FluxPipeline", {
            "scheduler": steps, "transformer": transformer, "vae": diffusers.AutoencoderKL(**_VAE_2D),
        }  # fmt: skip
    if name == "flux2":
        axes = {"in_channels": 64, "attention_head_dim": 64, "num_single_layers": 4, "axes_dims_rope": (16, 16, 16, 16)}
        transformer = diffusers.Flux2Transformer2DModel(**_FLOW, **axes)
        vae = {key: each for key, each in _VAE_2D.items() if key != "shift_factor"}
        return "Flux2Pipeline", {
            "scheduler": steps, "transformer": transformer, "vae": diffusers.AutoencoderKLFlux2(**vae),
        }  # fmt: skip
    if name == "qwen":
        axes = {"in_channels": 64, "attention_head_dim": 64, "axes_dims_rope": (16, 24, 24), "patch_size": 2}
        transformer = diffusers.QwenImageTransformer2DModel(**{**_FLOW, **axes})
        vae = diffusers.AutoencoderKLQwenImage(**_VAE_3D)
        return "QwenImagePipeline", {"scheduler": steps, "transformer": transformer, "vae": vae}
    if name == "wan":
        sizes = {"num_attention_heads": 2, "attention_head_dim": 64, "text_dim": 64, "ffn_dim": 256, "num_layers": 4}
        transformer = diffusers.WanTransformer3DModel(**sizes)
        steps = diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True)
        vae = diffusers.AutoencoderKLWan(**_VAE_3D)
        return "WanPipeline", {"scheduler": steps, "transformer": transformer, "vae": vae}
    sizes = {"num_layers": 4, "num_single_layers": 4, "num_attention_heads": 2, "attention_head_dim": 64}
    sizes |= {"text_embed_dim": 64, "pooled_projection_dim": 32, "num_refiner_layers": 1}
    transformer = diffusers.HunyuanVideoTransformer3DModel(**sizes, rope_axes_dim=(16, 24, 24))
    vae = diffusers.AutoencoderKLHunyuanVideo(
        block_out_channels=(16, 16, 32, 32), layers_per_block=1, norm_num_groups=8
    )
    return "HunyuanVideoPipeline", {"scheduler": steps, "transformer": transformer, "vae": vae}


class _Storages(TorchDispatchMode):
    """The storages of a real call: bytes of those that live, asked of themselves after every operator."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, weakref.ref[Any]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            for each in result if isinstance(result, tuple | list) else [result]:
                if isinstance(each, torch.Tensor):
                    storage = each.untyped_storage()
                    self.made[id(storage)] = weakref.ref(storage)
        alive = {key: storage for key, made in self.made.items() if (storage := made()) is not None}
        self.made = {key: self.made[key] for key in alive}
        is_convolution = func is torch.ops.aten.convolution.default
        beside = args[0].nbytes + result.nbytes if is_convolution else 0  # as cuDNN copies them
        self.peak = max(self.peak, sum(storage.nbytes() for storage in alive.values()) + beside)
        return result


def live_peak(pipe: Any, size: dict[str, int]) -> int:
    """Peak of the tensors of a call on a CPU, whose kernels' own buffers are not a GPU's."""
    given = pipeline_peaks.prompt(pipe, inspect.signature(type(pipe).__call__).parameters)
    with torch.no_grad(), _Storages() as storages:
        pipe(**given, **size, num_inference_steps=1, output_type="pt")
    return storages.peak + sum(each.nbytes for each in given.values())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), [
    ("flux", {"height": 256, "width": 256}), ("flux2", {"height": 256, "width": 256}),
    ("qwen", {"height": 128, "width": 128}), ("wan", {"height": 128, "width": 128, "num_frames": 9}),
    ("hunyuan", {"height": 64, "width": 64, "num_frames": 9}),
])  # fmt: skip
def test_the_count_is_within_a_tenth_of_what_lives(name: str, size: dict[str, int]) -> None:
    """In a real call on a CPU; the pipeline that is counted has the same blocks, of which it keeps two of a kind."""
    kind, parts = parts_of(name)
    described = pipeline_peaks.describe({"_class_name": kind}, parts)
    counted = pipeline_peaks.count_call(described, size["height"], size["width"], size.get("num_frames"), False)
    known = inspect.signature(getattr(diffusers, kind).__init__).parameters
    pipe = getattr(diffusers, kind)(**{key: parts.get(key) for key in known if key != "self"})
    pipe.set_progress_bar_config(disable=True)
    assert counted.peak_bytes == pytest.approx(live_peak(pipe, size), rel=0.1)


# On an H200, of one step of the transformer with all weights resident: the peak less what was held before it
# (benchmarks/results/2026-11-23-offloaders-h200.jsonl).
@pytest.mark.slow
@pytest.mark.parametrize(("table", "model", "size"), [
    ("offloaders-flux", "black-forest-labs/FLUX.1-dev", (1024, 1024, None)),
    ("offloaders-wan", "Wan-AI/Wan2.2-T2V-A14B-Diffusers", (480, 832, 81)),
])  # fmt: skip
def test_a_tiled_call_takes_what_a_step_took_on_a_gpu(table: str, model: str, size: tuple[Any, ...]) -> None:
    """With tiles of 256 pixels the VAE takes less than the transformer, so that the peak of the call is the step's."""
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    row = next(row for row in rows if (row["table"], row["case"]) == (table, "resident"))
    described = json.loads(known_facts(model, 0).pipeline)
    if "AutoencoderKL" in described["configs"]["vae"]:
        described["configs"]["vae"][-1] |= {"tile_sample_min_size": 256, "tile_latent_min_size": 32}
    counted = pipeline_peaks.count_call(json.dumps(described), *size, True)
    assert counted.peak_bytes == pytest.approx(row["start_peak_device_bytes"] - row["held_device_bytes"], rel=0.1)


class TestPlans:
    @pytest.mark.slow
    def test_keep_the_call_within_the_budget(self) -> None:
        workload = headrace.Workload(height=1024, width=1024)
        plain = plan_model(PlanRequest("flux.1-dev", "8GiB", machine="3060"))
        planned = plan_model(PlanRequest("flux.1-dev", "8GiB", workload, machine="3060"))
        call = planned.planner.profile.call
        assert str(call) == "1024 x 1024"
        assert call.room_bytes == call.peak_bytes * 101 // 100
        assert plain.plan.device_bytes > (8 << 30) - call.room_bytes >= planned.plan.device_bytes > 0
        assert planned.prediction.memory[0].activation_bytes == call.room_bytes

    def test_say_the_largest_call(self) -> None:
        description = known_facts("black-forest-labs/FLUX.1-dev", 0).pipeline
        profile = pipeline_peaks.CallProfile(pipeline=description, asked=(512, 512, None, False))
        largest = profile.largest(profile.call.peak_bytes * 2)
        assert largest is not None
        assert profile.call.peak_bytes < largest.peak_bytes <= profile.call.peak_bytes * 2
        more = pipeline_peaks.count_call(description, largest.height + 32, largest.width + 32, None, False)
        assert more.peak_bytes > profile.call.peak_bytes * 2
        assert profile.largest(0) is None

    def test_the_largest_call_is_one_that_the_pipeline_takes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def count_call(pipeline: str, height: int, width: int, frames: int, tiling: bool) -> pipeline_peaks.Call:
            if frames > 17:
                raise OptionError("too many")
            return pipeline_peaks.Call(frames, height, width, frames, 4)

        monkeypatch.setattr(pipeline_peaks, "count_call", count_call)
        profile = pipeline_peaks.CallProfile(pipeline="{}", asked=(64, 64, 9, False))
        largest = profile.largest(1000)
        assert largest is not None
        assert largest.frames == 17

    def test_a_budget_below_names_the_call(self) -> None:
        workload = headrace.Workload(height=1024, width=1024)
        with pytest.raises(BudgetError, match=r"for the cache and activations of 1024 x 1024.*fits \d+ x \d+"):
            plan_model(PlanRequest("flux.1-dev", "1GiB", workload, machine="3060"))

    def test_what_has_no_frames_says_so(self) -> None:
        frames = PlanRequest("flux.1-dev", "8GiB", headrace.Workload(frames=9), machine="3060")
        with pytest.raises(OptionError, match="its call has no argument num_frames"):
            plan_model(frames)
        odd = PlanRequest("wan2.2-t2v-a14b-diffusers", "8GiB", headrace.Workload(height=100), machine="3060")
        with pytest.raises(
            OptionError, match="cannot be counted: ValueError: `height` and `width` have to be divisible"
        ):
            plan_model(odd)

    @pytest.mark.parametrize("policy", ["8GiB", headrace.Prefetch(4)])
    def test_a_model_that_is_no_pipeline_is_refused(self, policy: Any) -> None:
        with pytest.raises(OptionError, match="height: expected a pipeline of diffusers"):
            headrace.make_plan("Qwen/Qwen3-8B", policy, workload=headrace.Workload(height=512), machine="3060")

    @pytest.mark.slow
    @pytest.mark.parametrize(("table", "model", "passes"), [
        ("offloaders-flux", "black-forest-labs/FLUX.1-dev", 1),
        ("offloaders-wan", "Wan-AI/Wan2.2-T2V-A14B-Diffusers", 2),
    ])  # fmt: skip
    def test_predict_steps_somewhat_below_those_of_a_gpu(self, table: str, model: str, passes: int) -> None:
        """By the share that the note states for what is not counted."""
        rows = [json.loads(line) for line in RESULTS.read_text().splitlines()]
        row = next(row for row in rows if (row["table"], row["case"]) == (table, "resident"))
        size = (480, 832, 81) if passes == 2 else (1024, 1024, None)
        counted = pipeline_peaks.count_step(known_facts(model, 0).pipeline, *size)
        assert [name for name, _ in counted] == ["transformer"] * passes
        with pytest.warns(headrace.HeadraceWarning, match="known by name"):
            planned = plan_model(PlanRequest(model, "100GiB", machine="h200"))
        assert not planned.plan.units
        for name, operations in counted:
            ratio = row["ms"] / 1e3 / planned.planner._pass_s(planned.plan, name, operations)
            assert 1.2 < ratio < 1.4

    @pytest.mark.slow
    def test_steps_take_time_and_no_memory(self) -> None:
        plans = {}
        for steps in (None, 1, 28):
            workload = headrace.Workload(height=512, width=512, steps=steps)
            plans[steps] = headrace.make_plan("flux.1-dev", headrace.Budget("8GiB", workload=workload), machine="3060")
        assert plans[None].to_json() == plans[1].to_json() == plans[28].to_json()
        text = "28 steps of 1 pass each: "
        assert not any(" of 1 pass " in note for note in plans[None].prediction.notes)
        assert [note[: len(text)] for note in plans[28].prediction.notes if " of 1 pass " in note] == [text]
        seconds = []
        for steps in (1, 28):
            note = next(note for note in plans[steps].prediction.notes if " of 1 pass " in note)
            found = re.search(r"each: ([\d.]+) (ms|s) of copies", note)
            assert found is not None, note
            seconds.append(float(found[1]) / (1e3 if found[2] == "ms" else 1))
        assert seconds[1] == pytest.approx(28 * seconds[0], rel=0.01)

    @pytest.mark.parametrize("steps", [0, -1, True, "4", 1.5])
    def test_steps_are_a_positive_number(self, steps: Any) -> None:
        with pytest.raises(OptionError if isinstance(steps, int) and not steps > 0 else OptionTypeError, match="steps"):
            headrace.Workload(steps=steps)

    @pytest.mark.slow
    def test_steps_on_the_command_line(self) -> None:
        card = ("--machine", "3060", "--device-memory", "8GiB", "--steps")
        done = succeed("plan", "flux.1-dev", *card, "4")
        assert "4 steps of 1 pass each:" in " ".join(done.stdout.split())
        for wrong in ("0", "-1", "many"):
            assert "steps" in error_of("plan", "flux.1-dev", *card, wrong)
        assert "steps: expected a pipeline of diffusers" in error_of("plan", "Qwen/Qwen3-8B", *card, "4")
        assert "--steps has no effect" in error_of("plan", "flux.1-dev", "--steps", "4")

    @pytest.mark.slow
    def test_on_the_command_line(self) -> None:
        size = ("--height", "512", "--width", "512", "--device-memory", "8GiB")
        done = succeed("plan", "flux.1-dev", "--machine", "3060", *size)
        text = " ".join(done.stdout.split())
        assert "a call for 512 x 512 takes up to" in text
        assert "with the fewest weights resident fits, up to 4 times as high:" in text
        assert "height, width: expected a pipeline" in error_of("plan", "Qwen/Qwen3-8B", "--machine", "3060", *size)


@pytest.mark.slow
def test_a_pipeline_that_is_loaded_keeps_room_for_its_call() -> None:
    pipe = pipelines.build("flux")
    size = headrace.Workload(height=64, width=64)
    pipe, handle = load(pipe, headrace.Budget("16MiB", workload=size))
    described = pipeline_peaks.describe({"_class_name": "FluxPipeline"}, pipe.components)
    peak_bytes = pipeline_peaks.count_call(described, 64, 64, None, False).peak_bytes
    assert 0 < handle.plan.device_bytes <= (16 << 20) - peak_bytes
    pipe("a b", height=64, width=64, num_inference_steps=1, output_type="pt")
    assert handle.stats().bytes_moved > 0
    handle.remove()


class Derived(diffusers.FluxTransformer2DModel):  # type: ignore[misc]
    """A user's transformer, which is counted by its own class."""


class DerivedPipeline(diffusers.FluxPipeline):  # type: ignore[misc]
    """A user's pipeline, the same."""


@pytest.mark.parametrize("change", ["compiled transformer", "compiled vae", "derived transformer", "derived pipeline"])
def test_a_component_that_is_compiled_or_derived_is_counted(change: str) -> None:
    pipe, twin = pipelines.build("flux"), pipelines.build("flux")
    how, name = change.split()
    if how == "compiled":
        setattr(pipe, name, torch.compile(getattr(pipe, name), backend="eager"))
    elif name == "transformer":
        pipe.transformer.__class__ = Derived
    else:
        pipe.__class__ = DerivedPipeline
    budget = headrace.Budget("8MiB", workload=headrace.Workload(height=32, width=32))
    plans = []
    for each in (pipe, twin):
        _, handle = load(each, budget)
        plans.append((handle.plan.resident, handle.plan.device_bytes))
        handle.remove()
    assert plans[0] == plans[1]


def test_what_cannot_be_counted_is_named() -> None:
    from diffusers.modular_pipelines.flux.modular_blocks_flux import FluxAutoBlocks

    budget = headrace.Budget("8MiB", workload=headrace.Workload(height=32, width=32))
    pipe = pipelines.build("flux")
    modular = FluxAutoBlocks().init_pipeline()
    modular.update_components(
        **{key: pipe.components[key] for key in modular.component_names if key in pipe.components}
    )
    with pytest.raises(OptionError, match=r"height, width: expected a DiffusionPipeline.*FluxModularPipeline.*leave"):
        load(modular, budget)
    pipe.transformer.__class__ = types.new_class("Own", (diffusers.FluxTransformer2DModel,))
    with pytest.raises(OptionError, match=r"expected Own at the top of .*or leave height"):
        load(pipe, budget)
    pipe.transformer = torch.nn.Linear(2, 2)
    with pytest.raises(OptionError, match="expected a transformer or unet that is a model of diffusers, found none"):
        load(pipe, budget)


@pytest.mark.parametrize("size", [{"height": 256, "width": 256}, {}])
def test_tiles_that_the_pipeline_does_not_decode_in_are_refused(size: dict[str, int]) -> None:
    """Without a size the pipeline's own counts, in tiles too."""
    pipe = pipelines.build("flux")
    budget = headrace.Budget("60MiB", workload=headrace.Workload(**size, tiling=True))
    with pytest.raises(OptionError, match=r"tiling: .*pipe\.vae\.enable_tiling\(\) before load.*leave tiling out"):
        load(pipe, budget)
    pipe.vae.enable_tiling()
    _, handle = load(pipe, budget)
    described = pipeline_peaks.describe({"_class_name": "FluxPipeline"}, pipe.components)
    peak_bytes = pipeline_peaks.count_call(described, size.get("height"), size.get("width"), None, True).peak_bytes
    assert handle.plan.device_bytes <= (60 << 20) - peak_bytes
