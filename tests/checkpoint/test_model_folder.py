"""The promise: a model is found by what people call it, and what is no model is answered with what to do instead."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import headrace
from checkpoints import HEADS, SIZE, environment, make, resident, run
from commands import error_of
from commands import run as command
from headrace.adapters.transformers import load
from headrace.checkpoint.model_folder import model_folder, model_name, model_to_plan
from headrace.errors import CheckpointError, OptionTypeError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model."""
    place = tmp_path_factory.mktemp("model")
    make("Qwen3ForCausalLM", **SIZE, **HEADS, head_dim=16).save_pretrained(place)
    return place


@pytest.fixture
def cache(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the Hub, laid out as its library does, with one model."""
    hub = tmp_path / "home" / "hub"
    add(hub, "Qwen/Qwen3-tiny", folder)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    return hub


def add(hub: Path, name: str, folder: Path, revision: str = "main") -> Path:
    """Put `folder` into a cache as a download does: blobs, links to them, and the commit that a revision names."""
    repository, commit = hub / f"models--{name.replace('/', '--')}", "1a2b" * 10
    snapshot, blobs = repository / "snapshots" / commit, repository / "blobs"
    for place in (snapshot, blobs, repository / "refs"):
        place.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        shutil.copy(file, blobs)
        (snapshot / file.name).symlink_to(os.path.relpath(blobs / file.name, snapshot))
    (repository / "refs" / revision).write_text(commit)
    return snapshot


class TestFound:
    def test_by_its_name_on_the_hub(self, folder: Path, cache: Path) -> None:
        """And loaded: the same outputs, streamed from the cache's files."""
        everything = headrace.Prefetch(prefetch_step=2, params=[headrace.config.ALL_MODEL_PARAMS], mode="disk")
        model, handle = load("Qwen/Qwen3-tiny", everything, device="cpu")
        assert torch.equal(run(model), run(resident(folder)))
        assert handle.stats().bytes_moved > 0
        handle.remove()

    def test_by_the_folder_of_the_cache(self, cache: Path) -> None:
        snapshot = model_folder("Qwen/Qwen3-tiny")
        assert snapshot == next(cache.glob("models--*/snapshots/*"))
        assert model_folder(cache / "models--Qwen--Qwen3-tiny") == snapshot
        assert model_folder(snapshot) == snapshot
        assert model_name(snapshot) == "Qwen/Qwen3-tiny"

    def test_a_folder_comes_first(self, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        place = cache.parent / "Qwen" / "Qwen3-tiny"
        shutil.copytree(folder, place)
        monkeypatch.chdir(cache.parent)
        assert model_folder("Qwen/Qwen3-tiny").absolute() == place
        assert model_name(model_folder("Qwen/Qwen3-tiny")) == "Qwen3-tiny"

    def test_the_files_come_before_what_is_known_by_name(self, folder: Path, cache: Path) -> None:
        assert model_to_plan("qwen3-8b") == "Qwen/Qwen3-8B"
        snapshot = add(cache, "Qwen/Qwen3-8B", folder)
        assert model_to_plan("qwen3-8b") == model_to_plan("Qwen/Qwen3-8B") == snapshot

    def test_below_the_home_folder(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(folder.parent))
        assert model_folder(f"~/{folder.name}") == folder

    def test_the_commands_use_names(self, cache: Path) -> None:
        planned = command("plan", "Qwen/Qwen3-tiny", "--device-memory", "700KiB")
        assert planned.exit_code == 0, planned.output
        assert "Qwen/Qwen3-tiny" in planned.stdout
        assert cache.name not in planned.stdout

    @pytest.mark.slow
    @pytest.mark.parametrize("variable", ["HF_HOME", "HF_HUB_CACHE"])
    def test_variables_of_the_hub_are_obeyed(self, cache: Path, variable: str) -> None:
        """And torch is not imported for the answer, nor is anything asked of the network."""
        code = """
import socket, sys
def refuse(*_): raise AssertionError("the network was used")
socket.socket.connect = refuse
from headrace.checkpoint.model_folder import model_folder
print(model_folder("Qwen/Qwen3-tiny"))
assert "torch" not in sys.modules
"""
        place = {"HF_HOME": cache.parent, "HF_HUB_CACHE": cache}[variable]
        env = {**environment(), "HF_HOME": "/nonexistent", variable: str(place)}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
        assert done.stdout.strip() == str(next(cache.glob("models--*/snapshots/*")))


class TestNotFound:
    def test_a_name_that_is_not_in_the_cache(self, cache: Path) -> None:
        message = error_of("plan", "Qwen/Qwen3-tinny")
        assert f"found no such folder, nor the name in {cache}, which has Qwen/Qwen3-tiny; fetch the model" in message
        assert "e.g. `hf download Qwen/Qwen3-tinny`; to plan it, its config is enough: `hf download Qwen/" in message
        assert message.endswith("(known without files: Qwen/Qwen3-8B, Qwen/Qwen3-4B, Qwen/Qwen3-32B)")

    @pytest.mark.usefixtures("cache")
    @pytest.mark.parametrize(("name", "text"), [
        ("unsloth/Qwen3-8B-GGUF", "GGUF, .* which headrace does not load; take .* release, Qwen/Qwen3-8B, or"),
        ("mlx-community/Qwen3-8B-4bit", "MLX, .*, Qwen/Qwen3-8B, or"),
        ("someone/Qwen3-8B-MLX-8bit", "MLX, .*, Qwen/Qwen3-8B, or"),
        ("someone/Unknown-7B-exl3", "EXL, a format of ExLlama, .* safetensors release or one in fp8"),
        ("nvidia/Qwen3-30B-A3B-NVFP4", r"\(modelopt\), .*, Qwen/Qwen3-30B-A3B, or"),
        ("nvidia/Llama-3.1-8B-Instruct-FP8", r"\(modelopt\), .*, meta-llama/Llama-3.1-8B-Instruct, or"),
    ])  # fmt: skip
    def test_names_of_other_formats(self, name: str, text: str) -> None:
        with pytest.raises(CheckpointError, match=text) as caught:
            model_folder(name)
        assert "hf download" not in str(caught.value)

    @pytest.mark.usefixtures("cache")
    @pytest.mark.parametrize("name", ["RedHatAI/Qwen3-8B-NVFP4", "Qwen/Qwen3-8B-FP8", "Qwen/Qwen3-8B-AWQ"])
    def test_names_of_formats_that_are_loaded(self, name: str) -> None:
        with pytest.raises(CheckpointError, match="fetch the model first"):
            model_folder(name)
        assert "e.g. `hf download ORGANISATION/tinny`" in error_of("plan", "tinny")
        assert "nor the name" not in error_of("plan", "./Qwen/Qwen3-tinny")  # written as a path

    def test_another_revision_alone(self, folder: Path, cache: Path) -> None:
        snapshot = add(cache, "org/other", folder, revision="v2")
        with pytest.raises(CheckpointError, match="expected the revision main of org/other") as caught:
            model_folder("org/other")
        assert f"found other revisions ({snapshot}): give the folder of one, or fetch it with" in str(caught.value)

    def test_half_a_download(self, cache: Path) -> None:
        (cache / "models--org--half").mkdir()
        with pytest.raises(CheckpointError, match="found no revision: fetch it with `hf download org/half`"):
            model_folder("org/half")

    def test_the_cache_itself(self, cache: Path) -> None:
        for place in (cache, cache.parent):
            message = error_of("plan", place)
            assert "found a cache of the Hub; give the name of a model in it: Qwen/Qwen3-tiny" in message

    def test_a_folder_of_models(self, folder: Path, tmp_path: Path) -> None:
        shutil.copytree(folder, tmp_path / "inside")
        message = f"found none, but one in inside; give, for example, '{tmp_path}/inside'"
        with pytest.raises(CheckpointError, match=message):
            model_folder(tmp_path)

    def test_no_path(self) -> None:
        with pytest.raises(OptionTypeError, match="path: expected a str or path of a folder, found int"):
            model_folder(3)  # type: ignore[arg-type]


def with_files(place: Path, **files: str) -> Path:
    for name, text in files.items():
        (place / name.replace("__", ".")).write_text(text)
    return place


class TestOfAnotherKind:
    @pytest.fixture
    def refuses(self, tmp_path: Path) -> Callable[..., str]:
        """The error for a folder of these files; the same from every door."""

        def error(is_planned: bool = False, **files: str) -> str:
            with_files(tmp_path, **files)
            with pytest.raises(CheckpointError) as caught:
                load(tmp_path, "1GiB")
            for verb in (("plan",), ("generate", "--prompt", "a"))[is_planned:]:
                assert error_of(verb[0], tmp_path, *verb[1:]) == f"error: {caught.value}"
            return str(caught.value)

        return error

    def test_an_adapter(self, refuses: Callable[..., str]) -> None:
        message = refuses(adapter_config__json='{"base_model_name_or_path": "org/base"}', adapter_model__safetensors="")
        assert "expected a whole model, found an adapter of org/base (adapter_config.json); load both with" in message
        assert "AutoPeftModelForCausalLM.from_pretrained(" in message
        assert "merge_and_unload().save_pretrained(FOLDER)" in message

    def test_gguf(self, refuses: Callable[..., str], tmp_path: Path) -> None:
        message = refuses(**{"model-q4__gguf": "GGUF"})
        assert "found GGUF (model-q4.gguf), a format of llama.cpp; use the model's safetensors release" in message
        assert f"from_pretrained('{tmp_path}', gguf_file='model-q4.gguf').save_pretrained(FOLDER)" in message
        assert "found GGUF (model-q4.gguf)" in error_of("plan", tmp_path / "model-q4.gguf")

    def test_a_pipeline_and_a_part_of_it(self, refuses: Callable[..., str], tmp_path: Path) -> None:
        message = refuses(config__json='{"_class_name": "FluxTransformer2DModel"}', a__safetensors="")
        assert "found FluxTransformer2DModel of diffusers; load it with diffusers, model = FluxTransf" in message
        message = refuses(is_planned=True, model_index__json="{}")
        assert "found a diffusers pipeline (model_index.json), which is several; load all" in message
        assert f"in one budget: headrace.adapters.diffusers.load('{tmp_path}', \"12GiB\")" in message
        assert "expected components of diffusers or transformers, found none" in error_of("plan", tmp_path)

    def test_pickles(self, refuses: Callable[..., str], tmp_path: Path) -> None:
        message = refuses(config__json='{"architectures": ["BertModel"]}', pytorch_model__bin="")
        assert "found pickled weights alone (pytorch_model.bin), which have no headers" in message
        assert f"BertModel.from_pretrained('{tmp_path}').save_pretrained(FOLDER)" in message

    def test_a_file(self, folder: Path) -> None:
        assert f"found a file; give the folder that it is in, '{folder}'" in error_of(
            "plan", folder / "model.safetensors"
        )
        assert model_folder(folder / "config.json") == folder
