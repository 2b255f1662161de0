"""The promise: a config alone gives the sizes that the files' headers give, and models known by name have those of
their publishers, without importing torch."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

import headrace
from checkpoints import HEADS, SIZE, make
from headrace.checkpoint.metadata_cache import KNOWN_MODELS, body_text, known_facts, known_models
from headrace.errors import CheckpointError, HeadraceWarning, OptionError
from headrace.plan_model import plan_model
from headrace.planning.request import PlanRequest
from known_models import MODELS, PIPELINES, facts_of, num_parameters, pipeline_facts
from quantised_checkpoints import FORMATS, MLA, MOE

PLAIN = [name for name, known in MODELS.items() if "quantization_config" not in known.config]
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def close_to(published: int | float, billions: float) -> bool:
    """To a hundredth, or to the last digit of a whole number: publishers round, some of them down."""
    return abs(billions - published) <= max(0.01 * published, 0.5 * isinstance(published, int))


class TestKnownModels:
    def test_they_are_those_of_the_table(self) -> None:
        assert known_models() == [*MODELS, *PIPELINES]
        assert KNOWN_MODELS.stat().st_size < 900_000

    @pytest.mark.parametrize("name", PLAIN)
    def test_have_the_published_number_of_parameters(self, name: str) -> None:
        storages = [storage for storage in known_facts(name, 0).inventory.storages if storage.has_parameter]
        count = sum(storage.num_bytes // storage.tensors[0].dtype.itemsize for storage in storages)
        assert close_to(MODELS[name].billions, count / 1e9)

    @pytest.mark.parametrize(("name", "measured"), [
        ("unsloth/Llama-3.3-70B-Instruct-bnb-4bit", "llama-3.3-70b-nf4"), ("Qwen/Qwen3-30B-A3B", "qwen3-30b-a3b"),
    ])  # fmt: skip
    def test_weigh_what_was_measured(self, name: str, measured: str) -> None:
        """With bitsandbytes itself on an H200, for the first."""
        found = (json.loads(line) for line in (RESULTS / "2026-11-23-card-24gb-h200.jsonl").read_text().splitlines())
        weighed = {row["model"]: row["weight_bytes"] for row in found}
        assert known_facts(name, 0).inventory.num_bytes == pytest.approx(weighed[measured], rel=1e-6)

    @pytest.mark.parametrize("name", [name for name, known in MODELS.items() if known.gigabytes])
    def test_weigh_what_is_published(self, name: str) -> None:
        """Less a layer of multi-token prediction, in 16 bits, of Qwen3.5; and to the digits that are stated."""
        num_bytes, head = known_facts(name, 0).inventory.num_bytes, 0.0
        if "Qwen3.5" in name:
            plain = known_facts(name.removesuffix("-GPTQ-Int4"), 0).inventory.storages
            head = 1.5 * max(s.num_bytes for s in plain if s.name.endswith("experts.gate_up_proj"))
        assert (num_bytes + head) / 1e9 == pytest.approx(MODELS[name].gigabytes, rel=0.03)

    @pytest.mark.slow
    @pytest.mark.parametrize("name", [name for name in MODELS if name not in PLAIN])
    def test_have_the_published_number_of_parameters_before_quantisation(self, name: str) -> None:
        assert close_to(MODELS[name].billions, num_parameters(MODELS[name]) / 1e9)

    @pytest.mark.slow
    @pytest.mark.parametrize("name", MODELS)
    def test_are_made_from_their_configs(self, name: str) -> None:
        """After a change: python benchmarks/known_models.py"""
        with ZipFile(KNOWN_MODELS) as archive:
            assert archive.read(f"{name}.json").decode() == body_text(facts_of(name, MODELS[name]))

    @pytest.mark.slow
    @pytest.mark.parametrize("name", PIPELINES)
    def test_pipelines_have_the_published_transformers(self, name: str) -> None:
        found = known_facts(name, 0)
        weights = [s for s in found.inventory.storages if s.name.startswith("transformer.")]
        assert PIPELINES[name].billions == round(sum(s.num_bytes for s in weights) / 2e9)
        with ZipFile(KNOWN_MODELS) as archive:
            assert archive.read(f"{name}.json").decode() == body_text(pipeline_facts(name, PIPELINES[name]))

    @pytest.mark.slow
    def test_a_budget_of_a_pipeline_is_for_what_every_step_runs(self) -> None:
        """As in 2026-11-23-diffusers-plans.jsonl, and a step as measured on an H200 (338 ms)."""
        planned = plan_model(PlanRequest("flux.1-dev", headrace.Budget("6GiB", codec="none"), machine="h200"))
        assert planned.workload.batch_sizes == (4608,)
        moved = sum(unit.num_bytes for unit in planned.plan.units if unit.module_fqn.startswith("transformer."))
        assert moved == pytest.approx(18408800256, rel=0.01)
        other_s = (planned.plan.moved_bytes - moved) / 55e9  # text encoders and VAE, which a call runs once
        assert planned.prediction.forecasts[0].step_s == pytest.approx(0.338 + other_s, rel=0.1)

    @pytest.mark.slow
    def test_plan_without_torch_in_a_second_and_a_half(self) -> None:
        """Of the CPU, the least of three: processes beside it slow a core that they share."""
        code = (
            "import sys; from headrace.cli import app; app(sys.argv[1:], standalone_mode=False); "
            "sys.exit(str({'torch', 'transformers'} & set(sys.modules) or '') or 0)"
        )
        command = [sys.executable, "-c", code, "plan", "Qwen/Qwen3-8B", "--device-memory", "8GiB", "--machine", "4090"]
        took_s = []
        for _ in range(3):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            assert done.returncode == 0, done.stderr
            assert "Predicted steps" in done.stdout
            took_s.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert min(took_s) <= 1.5

    @pytest.mark.slow
    def test_in_python(self) -> None:
        with pytest.warns(HeadraceWarning, match="no file of it is here"):
            plan = headrace.make_plan("qwen3-8b", "8GiB", machine="4090")
        assert plan.model_name == "Qwen/Qwen3-8B"
        assert plan.device_bytes <= 8 * 2**30 < plan.weight_bytes

    def test_have_one_dtype(self) -> None:
        with pytest.raises(OptionError, match="leave --dtype out"):
            headrace.make_plan("qwen3-8b", "8GiB", machine="4090", dtype="float32")


def of_config_alone(folder: Path, place: Path) -> headrace.Plan:
    shutil.copy(folder / "config.json", place)
    with pytest.warns(HeadraceWarning, match="planned from config.json alone"):
        return headrace.make_plan(place, "10MB", machine="4090")


@pytest.mark.filterwarnings("ignore::headrace.errors.HeadraceWarning")
class TestConfigAlone:
    @pytest.mark.parametrize("sizes", [("Qwen3ForCausalLM", HEADS), ("Qwen3MoeForCausalLM", {**HEADS, **MOE}),
                                       ("DeepseekV3ForCausalLM", MLA)])  # fmt: skip
    def test_gives_the_plan_of_the_files(self, sizes: tuple[str, dict[str, object]], tmp_path: Path) -> None:
        folder, place = tmp_path / "files", tmp_path / "config"
        make(sizes[0], **SIZE, **sizes[1]).save_pretrained(folder)
        place.mkdir()
        expected, found = headrace.make_plan(folder, "10MB", machine="4090"), of_config_alone(folder, place)
        assert {name: each.num_bytes for name, each in found.placements.items()} == {
            name: each.num_bytes for name, each in expected.placements.items()
        }

    @pytest.mark.parametrize("name", ["fp8, blocks", "fp8, blocks, experts", "MXFP4, experts", "GPTQ int4", "AWQ int4"])
    def test_sizes_a_quantised_model_as_its_files_do(self, name: str, tmp_path: Path) -> None:
        folder, place = tmp_path / "files", tmp_path / "config"
        folder.mkdir()
        place.mkdir()
        FORMATS[name].write(folder)
        expected, found = headrace.make_plan(folder, machine="4090"), of_config_alone(folder, place)
        assert found.weight_bytes == pytest.approx(expected.weight_bytes, rel=0.01)

    def test_sizes_experts_in_fp4_beside_fp8(self, tmp_path: Path) -> None:
        """DeepSeek-V4-Flash, whose sizes are the defaults of transformers: 284 billion weights in 160 GB of files."""
        fp8 = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
        config = {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "expert_dtype": "fp4"}
        config |= {"dtype": "bfloat16", "quantization_config": fp8}
        (tmp_path / "config.json").write_text(json.dumps(config))
        plan = headrace.make_plan(tmp_path, device="cpu")
        assert plan.weight_bytes == pytest.approx(157e9, rel=0.01)
        experts = sum(size for name, size in plan.resident.items() if ".experts." in name)
        assert experts == 43 * 256 * 3 * 4096 * 2048 * (1 / 2 + 1 / 32)

    def test_refuses_what_it_cannot_size(self, tmp_path: Path) -> None:
        config = {**MODELS["Qwen/Qwen3-4B"].config, "quantization_config": {"quant_method": "hqq"}}
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match=r"found hqq; its files have headers that say them: download"):
            headrace.make_plan(tmp_path, machine="4090")

    @pytest.mark.slow
    def test_says_that_an_index_differs(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps(MODELS["Qwen/Qwen3-4B"].config))
        index = {"metadata": {"total_size": 2**34}, "weight_map": {}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.warns(HeadraceWarning, match=r"have 7\.492 GiB, and the files 16\.000 GiB by their index"):
            headrace.make_plan(tmp_path, machine="4090")

    def test_is_kept_until_files_are_there(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("HEADRACE_DISABLE_CACHE")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        folder, place = tmp_path / "files", tmp_path / "config"
        make("Qwen3ForCausalLM", **SIZE, **HEADS).save_pretrained(folder)
        place.mkdir()
        first, again = of_config_alone(folder, place), of_config_alone(folder, place)
        assert again.placements == first.placements
        shutil.copytree(folder, place, dirs_exist_ok=True)
        assert headrace.make_plan(place, "10MB", machine="4090").placements.keys() == first.placements.keys()
