"""The promise: a budget of "auto" is what is free less what it says, and a model that fits is not offloaded."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3Model

import headrace
from commands import error_of, succeed, tiny_model
from headrace.adapters.transformers import opened_model
from headrace.adapters.transformers.opened_model import open_model
from headrace.config import Budget, Workload
from headrace.errors import CheckpointError, HeadraceWarning, OptionError, SizeError
from headrace.flags import OffloadFlags, engine_surface
from headrace.formatting import format_size
from headrace.memory.system import Limits
from headrace.model import memory_profile
from headrace.plan.plan import DeviceName, Machine
from headrace.plan.speculation import Speculation
from headrace.plan_model import plan_model
from headrace.planning import context as planning_context
from headrace.planning.checks import needs_of
from headrace.planning.request import PlanRequest, Target
from headrace.runtime.prepare import open_ranks
from headrace.transfer.machine_probe import named_machine
from ranks import outcomes

model = tiny_model
pytestmark = pytest.mark.filterwarnings("ignore:.*no file of it is here")
GIB = 2**30


@pytest.mark.slow
def test_leaves_a_gibibyte_and_room_for_the_cache() -> None:
    planned = plan_model(
        PlanRequest("Qwen/Qwen3-30B-A3B", Budget("auto", workload=Workload([2], 8192)), machine="4090")
    )
    beside = planned.planner.profile.workload_bytes(2, 8192)
    assert beside > 2**29
    assert 20 * GIB < planned.plan.device_bytes + beside <= 22.5 * GIB
    assert planned.plan.offloaded_bytes > 0
    assert planned.plan.context == 8192
    text = "auto: 22.500 GiB of device memory, which leaves 1.000 GiB of what is free; "
    assert planned.prediction.notes[0].startswith(text)
    assert "in host memory; where there is less, --host-memory" in planned.prediction.notes[-2]


def test_a_model_that_fits_is_not_offloaded() -> None:
    plan = headrace.make_plan("Qwen/Qwen3-8B", "auto", machine="4090")
    assert (plan.offloaded_bytes, plan.context) == (0, 4096)
    assert plan.prediction.notes[0].endswith("1 x 4096 tokens; the weights fit, and nothing is offloaded")
    assert plan.prediction.shortage is None


@pytest.mark.slow
def test_the_cache_decides_whether_it_fits() -> None:
    long = Budget("auto", workload=Workload([16], 32768))
    assert headrace.make_plan("Qwen/Qwen3-8B", long, machine="h100").offloaded_bytes > 0
    assert headrace.make_plan("Qwen/Qwen3-8B", "auto", machine="h100").offloaded_bytes == 0
    workload = Workload([16], 32768)
    assert headrace.make_plan("Qwen/Qwen3-8B", "auto", workload=workload, machine="h100").offloaded_bytes > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*planned from config.json alone")
def test_a_model_that_fits_alone_makes_room_for_a_draft(tmp_path: Path) -> None:
    sizes = {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "vocab_size": 151936}
    Qwen3Config(**sizes, dtype="bfloat16", architectures=["Qwen3ForCausalLM"]).save_pretrained(tmp_path)
    draft = Speculation(str(tmp_path), 4, accepted=4.9)
    planned = plan_model(PlanRequest("Qwen/Qwen3-8B", "auto", machine="4090", speculation=draft))
    assert planned.context.draft is not None
    beside = planned.planner.profile.workload_bytes(1, 4096) + planned.context.draft.device_bytes
    assert planned.plan.offloaded_bytes > 0
    assert 20 * GIB < planned.plan.device_bytes + beside <= 22.5 * GIB
    assert "of what is free, beside" in planned.context.automatic
    roomy = PlanRequest("Qwen/Qwen3-8B", "auto", machine="h100", speculation=draft)
    assert plan_model(roomy).plan.offloaded_bytes == 0


@pytest.mark.slow
def test_the_context_is_no_longer_than_the_model_allows(model: Path) -> None:
    plan = headrace.make_plan(model, "auto", machine="4090")
    longest = plan_model(PlanRequest(model, None, machine="4090")).planner.profile.max_context
    assert longest is not None
    assert plan.context == min(longest, 4096)


@pytest.mark.slow
@pytest.mark.parametrize("is_folder", [True, False])
def test_caches_are_measured_once(model: Path, is_folder: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    for module in (opened_model, memory_profile):
        real = module.measured
        monkeypatch.setattr(module, "measured", lambda *args, real=real: (calls.append(args), real(*args))[1])
    target = model if is_folder else AutoModelForCausalLM.from_pretrained(model)
    assert headrace.make_plan(target, "auto", machine="4090").context == 4096
    assert len(calls) == 1


def test_of_this_machine_what_is_free_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    made_for, _ = named_machine("4090")
    planned = plan_model(PlanRequest("Qwen/Qwen3-8B", "12GiB", machine="4090"))
    request = PlanRequest("Qwen/Qwen3-8B", "auto")
    context = replace(planned.context, request=request, target=Target(DeviceName("cuda"), made_for))
    monkeypatch.setattr(planning_context, "read_limits", lambda device: Limits(11 * GIB))
    sized = context.sized()
    assert isinstance(sized.request.given, Budget)
    assert sized.request.given.num_bytes == 10 * GIB
    assert sized.sized() is sized


def sized_in_a_rank(rank: int, name: str) -> tuple[int, str | None, int]:
    """The plan of a rank whose GPU has ``rank`` GiB more than another's: its bytes, its mode, and what it offloads."""
    warnings.simplefilter("ignore", HeadraceWarning)  # that the model is known by name
    made_for, _ = named_machine("4090")
    planned = plan_model(PlanRequest(name, Budget("8GiB", mode="shm_cpu"), machine="4090"))
    target = Target(DeviceName("cuda"), made_for)
    with pytest.MonkeyPatch.context() as patch, open_ranks(dist.group.WORLD) as ranks:
        patch.setattr(planning_context, "read_limits", lambda device, **_: Limits((11 + rank) * GIB))
        request = PlanRequest(name, Budget("auto", mode="shm_cpu"), ranks=ranks)
        plan = replace(planned.context, request=request, target=target).sized().plan()
    return plan.device_bytes, plan.mode, plan.offloaded_bytes


@pytest.mark.slow
@pytest.mark.parametrize(("name", "fits"), [("Qwen/Qwen3-8B", False), ("Qwen/Qwen3-4B", True)])
def test_ranks_take_the_least_that_is_free_to_any(name: str, fits: bool) -> None:
    """Or their plans would differ, which is an error in all of them."""
    one, other = outcomes(2, sized_in_a_rank, name)
    assert one == other
    assert one[0] < 10 * GIB
    assert one[1] == "shm_cpu"
    assert (one[2] == 0) == fits


def test_the_default_of_verbs(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of `generate`, `chat` and `serve`: without a budget where no cache can be measured."""
    assert open_model(model).default_budget(2, 64) == Budget("auto", workload=Workload([2], 64))
    monkeypatch.setattr(Qwen3Model, "forward", lambda *_, **__: 1 / 0)
    assert open_model(model).default_budget(2, 64) is None


def plan_text(*args: str | Path) -> str:
    return " ".join(succeed("plan", *args).stdout.split())


@pytest.mark.slow
def test_plan_for_a_named_card_is_what_generate_would_do_there() -> None:
    text = plan_text("Qwen/Qwen3-8B", "--machine", "3060")
    assert text == plan_text("Qwen/Qwen3-8B", "--machine", "3060", "--device-memory", "auto")
    assert "auto: 10.500 GiB of device memory" in text
    assert "tokens/s" in text
    assert "the weights fit, and nothing is offloaded" in plan_text("Qwen/Qwen3-8B", "--machine", "4090")


def test_flags_that_say_how_need_no_budget_for_a_named_card(model: Path) -> None:
    how = ("--host-memory", "2GiB", "--context", "128", "--offload-codec", "none")
    text = plan_text(model, "--machine", "4090", *how)
    assert text == plan_text(model, "--machine", "4090", "--device-memory", "auto", *how)
    assert "Batch 1 at 128 tokens" in text


@pytest.mark.slow
def test_plan_for_a_gpu_in_the_memory_of_its_host_takes_files() -> None:
    text = plan_text("Qwen/Qwen3-235B-A22B", "--machine", "gb10")
    assert "bound by device GiB" in text
    assert "0 in host memory, the rest in files" in text  # which is the GPU's, where experts have slots


def test_plan_of_what_has_no_cache(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_DISABLE_CACHE", "1")
    monkeypatch.setattr(Qwen3Model, "forward", lambda *_, **__: 1 / 0)
    done = succeed("plan", model, "--machine", "4090")
    assert "planned without a budget" in " ".join(done.stderr.split())
    assert "The smallest budget is" in done.stdout


@pytest.mark.slow
def test_a_pipeline_has_steps_and_no_tokens() -> None:
    text = plan_text("black-forest-labs/FLUX.1-dev", "--machine", "4090")
    assert "rows step steps/s" in text
    assert not {"tokens", "tokens/s", "KV"} & set(text.split())


@pytest.mark.slow
def test_a_pipeline_by_rules() -> None:
    rules = plan_text("black-forest-labs/FLUX.1-dev", "--machine", "5090", "--offload-rule", "text_encoder_2=prefetch")
    assert "rows step steps/s" in rules
    assert " 4608 " in rules


@pytest.mark.slow
def test_a_draft_by_a_known_name_needs_no_file() -> None:
    args = ("Qwen/Qwen3-32B", "--machine", "3090", "--speculate")
    assert "guesses by Qwen/Qwen3-4B" in plan_text(*args, "Qwen/Qwen3-4B")
    mtp = error_of("plan", *args, "mtp")
    assert "its heads are made from its config: `hf download Qwen/Qwen3-32B" in mtp
    assert "needs no file" not in mtp
    assert "--speculate: neither lookup, mtp nor a draft model" in error_of("plan", *args, "some/other")


@pytest.mark.slow
def test_without_a_gpu(model: Path) -> None:
    with pytest.raises(OptionError, match=r"of cpu that is not known: .*`headrace plan --machine 4090`"):
        headrace.make_plan(model, "auto", device="cpu")
    with pytest.raises(OptionError, match="auto is what a GPU has free"):
        headrace.adapters.transformers.load(model, "auto", device="cpu")
    planned = plan_model(PlanRequest("Qwen/Qwen3-4B", "4GiB", machine="4090"))
    unknown = replace(planned.context, request=PlanRequest("m", "auto"))
    unknown = replace(unknown, target=replace(unknown.target, machine=Machine("some GPU")))
    with pytest.raises(OptionError, match="of some GPU that is not known"):
        unknown.sized()


def test_engines_take_a_size() -> None:
    """What a budget leaves is theirs, for caches."""
    with pytest.raises(SizeError, match="'auto' is not a size"):
        OffloadFlags(device_memory="auto").policy(engine_surface("vLLM"))
    assert OffloadFlags(device_memory="auto").policy() == Budget("auto")


@pytest.mark.slow
def test_flags_need_it(model: Path) -> None:
    done = succeed("plan", model, "--machine", "3060", "--device-memory", "auto", "--batch", "2", "--context", "64")
    assert "2 x 64 tokens" in " ".join(done.stdout.split())


@pytest.mark.slow
def test_a_pipeline_in_a_folder(tmp_path: Path) -> None:
    """Planned from its configs, and with the sizes that its components have."""
    diffusers = pytest.importorskip("diffusers")
    transformers = pytest.importorskip("transformers")
    sizes = {"num_layers": 2, "num_single_layers": 2, "attention_head_dim": 64, "num_attention_heads": 8}
    encoder = transformers.CLIPTextModel(transformers.CLIPTextConfig(num_hidden_layers=2))
    transformer = diffusers.FluxTransformer2DModel(**sizes, joint_attention_dim=512, axes_dims_rope=(8, 28, 28))
    index = {"_class_name": "FluxPipeline", "_diffusers_version": "0.42.1", "scheduler": ["diffusers", "DDIMScheduler"]}
    index |= {
        "text_encoder": ["transformers", "CLIPTextModel"],
        "transformer": ["diffusers", type(transformer).__name__],
    }
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    encoder.config.save_pretrained(tmp_path / "text_encoder")
    transformer.save_config(tmp_path / "transformer")
    with pytest.warns(headrace.HeadraceWarning, match="planned from the configs of its components in bfloat16"):
        plan = headrace.make_plan(tmp_path, "30MB", machine="4090")
    parameters = [*encoder.parameters(), *transformer.parameters()]
    assert plan.weight_bytes == pytest.approx(2 * sum(each.numel() for each in parameters), rel=0.001)
    assert plan.moved_bytes > 0
    assert plan.prediction.is_pipeline
    (tmp_path / "transformer" / "config.json").write_text("{}")
    (tmp_path / "text_encoder" / "config.json").write_text('{"hidden_size": "many"}')
    with pytest.raises(CheckpointError, match="CLIPTextModel of transformers cannot be made of its config"):
        headrace.make_plan(tmp_path, "30MB", machine="4090")


def test_tables_of_n_grams_count_in_host_memory() -> None:
    """A token reads a few rows of them, and no plan has them anywhere else."""
    with torch.device("meta"):
        layers = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096, bias=False) for _ in range(4)))
        model = torch.nn.ModuleDict({"table": torch.nn.Embedding(80_000_000, 160), "layers": layers}).bfloat16()
    plan = headrace.make_plan(model, headrace.Budget("100MB", codec="none"), machine="4090")
    size = 80_000_000 * 160 * 2
    assert needs_of(plan, on_gpu=True).host_bytes >= size
    (note,) = (each for each in plan.prediction.notes if "in host memory" in each)
    assert f"of which {format_size(size)} are tables that stay there in any plan" in note
