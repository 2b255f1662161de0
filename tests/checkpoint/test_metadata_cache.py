"""The promise: a folder is planned again from what was kept of it, exactly as if it were read, and only while nothing
that the reading depended on has changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import conversion_mapping
from typer.testing import CliRunner

import headrace
from checkpoints import HEADS, SIZE, environment, make, rewrite
from checks import raising
from headrace.adapters.transformers import opened_model
from headrace.checkpoint import metadata_cache
from headrace.checkpoint.metadata_cache import FolderFacts, folder_facts
from headrace.checkpoint.weight_map import WeightMap
from headrace.cli import app
from headrace.config import UVA, Budget, Policy, Prefetch, Rules, Workload
from headrace.errors import CheckpointError, HeadraceError
from headrace.model.inventory import take_inventory
from headrace.model.memory_profile import ModelProfile
from headrace.plan_model import PlanResult, plan_model
from headrace.planning.request import PlanRequest
from headrace.stores import file_reads
from headrace.transfer import machine_probe
from plans import memory_curve

LARGE = {**SIZE, "hidden_size": 256, "intermediate_size": 512}  # weights of 64 KiB and more, which may be offloaded
FAMILIES: dict[str, Callable[[], Any]] = {
    "tied": lambda: make("LlamaForCausalLM", torch.bfloat16, **LARGE, **HEADS, tie_word_embeddings=True),
    "fused experts": lambda: make(
        "Qwen3MoeForCausalLM", **LARGE, **HEADS, head_dim=64, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=128,
    ),
    "transposed": lambda: make("GPT2LMHeadModel", n_embd=256, n_layer=3, n_head=4, vocab_size=128, n_positions=512),
    "one layer again and again": lambda: make("AlbertModel", **LARGE, embedding_size=32),
    "two stacks": lambda: make(
        "T5ForConditionalGeneration", d_model=256, d_kv=64, d_ff=512, num_layers=2, num_heads=4, vocab_size=128
    ),
}  # fmt: skip
POLICIES: dict[str, Callable[[int], Policy | None]] = {
    "budget": lambda size: Budget(size * 4 // 5, workload=Workload([1, 4], 128)),
    "budget without a context": lambda size: Budget(size * 3 // 4),
    "host memory": lambda size: Budget(size * 4 // 5, host_memory=size // 4),
    "rules": lambda size: Rules([("re:.*norm.*", "resident"), ("re:.*weight", "prefetch")]),
    "prefetch": lambda size: Prefetch(),
    "in place": lambda size: UVA(size // 4),
    "none": lambda size: None,
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache that is used; the place of its entries."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    monkeypatch.delenv("HEADRACE_DISABLE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "headrace" / "folders"


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for name, build in FAMILIES.items():
        folders[name] = tmp_path_factory.mktemp("families") / name
        build().save_pretrained(folders[name])
    # In another dtype than config.json states: converted while it is read.
    rewrite(folders["two stacks"], lambda tensors: tensors.update({n: t.half() for n, t in tensors.items()}))
    config = json.loads((folders["two stacks"] / "config.json").read_text())
    (folders["two stacks"] / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    # Members of one tensor in several dtypes: made while loading, so that these do not stream.
    first = "model.layers.0.mlp.experts.0."
    rewrite(
        folders["fused experts"],
        lambda tensors: tensors.update({n: t.half() for n, t in tensors.items() if n.startswith(first)}),
    )
    return folders


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders that are read, one entry per reading."""
    found: list[Path] = []
    read = opened_model.open_model

    def counting(folder: Path, *options: Any) -> Any:
        found.append(folder)
        return read(folder, *options)

    monkeypatch.setattr(opened_model, "open_model", counting)
    return found


@pytest.fixture(scope="module")
def in_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("in shards")
    make("LlamaForCausalLM", **LARGE, **HEADS).save_pretrained(folder, max_shard_size="3MB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


@pytest.fixture
def folder(in_shards: Path, tmp_path: Path) -> Path:
    """A small model in two shards."""
    return shutil.copytree(in_shards, tmp_path / "model")


def told(planned: PlanResult) -> str:
    """All that a plan says; not what of this machine's memory is free."""
    prediction = {**planned.prediction.to_json(), "shortage": None}
    given, points = planned.context.request.given, []
    if isinstance(given, Budget) and planned.plan.offloaded_bytes:
        points = [(point.device_bytes, point.step_s) for point in memory_curve(planned.planner, given)]
    return json.dumps([planned.plan.to_json(), planned.plan.model_name, prediction, points])


def plain(facts: FolderFacts) -> list[object]:
    """Everything in ``facts``, dtypes by name."""
    storages = [
        (tensor.locations, tensor.byte_offset, tensor.shape, tensor.stride, str(tensor.dtype), tensor.dtype.itemsize,
         tensor.aliases, storage.num_bytes, storage.is_lookup, storage.is_saved)
        for storage in facts.inventory.storages for tensor in storage.tensors
    ]  # fmt: skip
    found = [
        (name, source.shape, str(source.dtype), part.offset, part.tensor.name, str(part.tensor.dtype),
         part.tensor.shape, part.tensor.path, part.tensor.offset, part.tensor.num_bytes)
        for name, source in facts.weights.sources.items() for part in source.parts
    ]  # fmt: skip
    inventory, checkpoint = facts.inventory, facts.weights.checkpoint
    rest: Any = (
        inventory.empty, list(inventory.modules.items()), inventory.lookups, inventory.containers, inventory.shared,
    )  # fmt: skip
    return [
        storages, found, rest, facts.profile, facts.differences, checkpoint.root, checkpoint.stamps,
        len(facts.weights.sources),
    ]  # fmt: skip


class TestEqual:
    @pytest.mark.slow
    @pytest.mark.parametrize("machine", [None, "h200"])
    @pytest.mark.parametrize("name", FAMILIES)
    def test_plans_predictions_and_curves(
        self, name: str, machine: str | None, families: dict[str, Path], reads: list[Path], cache: Path
    ) -> None:
        folder = families[name]
        size = opened_model.open_model(folder).inventory.num_bytes
        device = "cpu" if machine is None else None
        made = 0
        for policy in POLICIES.values():
            for used in list(cache.glob("*")):
                used.unlink()
            reads.clear()
            told_of: list[str] = []
            for count in (1, 1):
                with warnings.catch_warnings(record=True) as warned:
                    warnings.simplefilter("always")
                    try:
                        planned = plan_model(PlanRequest(folder, policy(size), machine=machine, device=device))
                        told_of.append(told(planned))
                        made += bool(planned.plan.offloaded_bytes)
                    except headrace.HeadraceError as error:  # what cannot be planned, cannot be planned again
                        told_of.append(str(error))
                told_of[-1] += "".join(str(each.message) for each in warned)
                assert len(reads) == count
            assert told_of[0] == told_of[1]
        assert made >= 2 * 3
        assert ("cannot be streamed" in told_of[0]) == (name == "fused experts")

    @pytest.mark.slow
    @pytest.mark.parametrize("name", FAMILIES)
    def test_every_record(self, name: str, families: dict[str, Path], reads: list[Path]) -> None:
        def read() -> Any:
            return opened_model.open_model(families[name]).facts(0)

        fresh, kept = folder_facts(families[name], read), folder_facts(families[name], read)
        assert len(reads) == 1
        assert plain(kept) == plain(fresh)
        assert dict(kept.weights.checkpoint.tensors) == dict(fresh.weights.checkpoint.tensors)
        missing = "no.such.tensor"
        assert str(kept.weights.checkpoint.lacks(missing, "")) == str(fresh.weights.checkpoint.lacks(missing, ""))

    @pytest.mark.slow
    def test_in_another_dtype(self, folder: Path, reads: list[Path]) -> None:
        """Which is another model, kept beside the folder's own."""
        found = []
        for dtype in (None, "bfloat16", None, "bfloat16", torch.bfloat16, torch.float16):
            found.append(told(plan_model(PlanRequest(folder, Budget("4MiB"), device="cpu", dtype=dtype))))
        assert len(reads) == 4
        assert (found[0], found[1]) == (found[2], found[3])
        assert found[0] != found[1]

    def test_modules_with_several_parents(self, folder: Path) -> None:
        """Of which none of the families above has any."""
        block = torch.nn.Linear(4, 4)
        block.cached = block.weight.detach().t()  # type: ignore[assignment]
        model = torch.nn.ModuleDict({"a": torch.nn.Sequential(block), "b": torch.nn.Sequential(block)})
        fresh = FolderFacts(take_inventory(model), ModelProfile(), WeightMap.open(folder))
        assert fresh.inventory.shared
        for _ in range(2):
            assert plain(folder_facts(folder, lambda: (fresh, []))) == plain(fresh)

    def test_some_stream_in_pieces_or_converted_and_some_not_at_all(self, families: dict[str, Path]) -> None:
        """Or the tests above would say little."""
        fused = opened_model.open_model(families["fused experts"])
        assert any(len(source.parts) > 1 for source in fused.weights.sources.values())
        assert any("experts" in name for name in fused.unstreamable)
        converted = opened_model.open_model(families["two stacks"]).weights
        assert all(source.is_converted for source in converted.sources.values())

    @pytest.mark.slow
    def test_with_neither_torch_nor_transformers(self, folder: Path) -> None:
        code = (
            "import sys\nfrom typer.testing import CliRunner\nfrom headrace.cli import app\n"
            f"done = CliRunner().invoke(app, ['plan', {str(folder)!r}, *sys.argv[1:]])\n"
            "assert done.exit_code == 0, done.output\nassert 'Predicted steps' in done.output\n"
            "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
        )

        def imported(*flags: str) -> str:
            command = [sys.executable, "-c", code, *flags]
            return subprocess.run(command, env=environment(), check=True, capture_output=True, text=True).stdout.strip()

        for context in (0, 64):  # for which memory is measured, too
            plan_model(PlanRequest(folder, None, device="cpu", workload=Workload([1], context)))
        plan_model(PlanRequest(folder, None, machine="h200"))  # kernels of experts differ between a GPU and a CPU
        assert imported("--device-memory", "6MiB", "--batch", "1,8", "--context", "64", "--device", "cpu") == "[]"
        assert imported("--offload-group-size", "2", "--machine", "h200") == "[]"

    def test_caches_are_measured_once(self, folder: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
        """With a context alone."""
        measured: list[object] = []
        real = opened_model.measured
        monkeypatch.setattr(opened_model, "measured", lambda *given: measured.append(1) or real(*given))
        for context in (0, 64, 128, 0, 64):
            planned = plan_model(PlanRequest(folder, None, Workload([1], context), device="cpu"))
            assert (planned.planner.profile.kv_bytes_per_token > 0) == (context > 0)
        assert (len(reads), len(measured)) == (2, 1)


class TestChanges:
    """Everything is read again after each of them, once."""

    def check(self, folder: Path, reads: list[Path], change: Callable[[], object], again: int = 1) -> PlanResult:
        plan_model(PlanRequest(folder, None, device="cpu"))
        plan_model(PlanRequest(folder, None, device="cpu"))
        assert len(reads) == 1
        change()
        for _ in range(2):
            planned = plan_model(PlanRequest(folder, None, device="cpu"))
        assert len(reads) == 1 + again
        return planned

    def test_of_the_configuration(self, folder: Path, reads: list[Path]) -> None:
        file = folder / "config.json"
        config = json.loads(file.read_text())
        status = file.stat()

        def change() -> None:
            file.write_text(json.dumps({**config, "max_position_embeddings": 4096}, indent=2))
            os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))

        assert self.check(folder, reads, change).planner.profile.max_context == 4096

    def test_of_a_shard(self, folder: Path, reads: list[Path]) -> None:
        """Other tensors in it; what was planned before does not count."""
        before = plan_model(PlanRequest(folder, None, device="cpu")).plan.weight_bytes
        other = make("LlamaForCausalLM", torch.bfloat16, **LARGE, **HEADS)
        other.config.dtype = torch.bfloat16

        def change() -> None:
            for file in folder.glob("model*"):
                file.unlink()
            other.save_pretrained(folder)

        assert self.check(folder, reads, change).plan.weight_bytes < before

    def test_of_a_header_alone(self, folder: Path, reads: list[Path]) -> None:
        """Two tensors of a shard change their names: the same size, time and inode."""
        shard = next(file for file in folder.glob("*.safetensors") if b"v_proj" in file.read_bytes())

        def change() -> None:
            status, raw = shard.stat(), shard.read_bytes()
            for old, new in ((b"k_proj", b"?_proj"), (b"v_proj", b"k_proj"), (b"?_proj", b"v_proj")):
                raw = raw.replace(old, new)
            shard.write_bytes(raw)
            os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))

        self.check(folder, reads, change)

    def test_of_the_time_of_a_shard(self, folder: Path, reads: list[Path]) -> None:
        """Its values may differ, and values decide about ties."""
        self.check(folder, reads, next(folder.glob("*.safetensors")).touch)

    def test_of_the_files_in_the_folder(self, folder: Path, reads: list[Path]) -> None:
        index = folder / "model.safetensors.index.json"
        self.check(folder, reads, lambda: index.write_text(index.read_text() + "\n"))

    def test_of_another_package(self, folder: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
        packages = folder.parent / "packages"
        (packages / "transformers-99.0.dist-info").mkdir(parents=True)
        self.check(folder, reads, lambda: monkeypatch.syspath_prepend(packages))

    def test_of_our_own_code(self, folder: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
        ours = folder.parent / "ours"
        ours.mkdir()
        (ours / "code.py").write_text("# version 1")
        monkeypatch.setattr(metadata_cache, "_OURS", ours)
        self.check(folder, reads, lambda: (ours / "code.py").write_text("# version 2.0"))

    def test_of_the_code_of_the_model(self, folder: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
        files = opened_model.open_model(folder).facts(0)[1]
        llama = transformers.models.llama
        for module in (llama.modeling_llama, llama.configuration_llama, conversion_mapping):
            assert module.__file__ in files
        reads.clear()
        code = folder.parent / "modeling.py"
        code.write_text("# version 1")
        monkeypatch.setattr(transformers.models.llama.modeling_llama, "__file__", str(code))
        self.check(folder, reads, lambda: code.write_text("# version 2.0"))

    def test_of_the_default_dtype(self, folder: Path, reads: list[Path]) -> None:
        try:
            self.check(folder, reads, lambda: torch.set_default_dtype(torch.float64))
        finally:
            torch.set_default_dtype(torch.float32)

    def test_of_nothing_that_matters(self, folder: Path, reads: list[Path]) -> None:
        """A plan that is saved in the folder, a tokenizer."""

        def change() -> None:
            plan_model(PlanRequest(folder, Budget("4MiB"), device="cpu")).plan.save(folder / "plan.json")
            (folder / "tokenizer.json").write_text("{}")

        self.check(folder, reads, change, again=0)

    def test_to_a_folder_that_is_no_model_any_more(self, folder: Path, reads: list[Path]) -> None:
        plan_model(PlanRequest(folder, None, device="cpu"))
        next(folder.glob("*.safetensors")).unlink()
        with pytest.raises(CheckpointError, match="missing"):
            plan_model(PlanRequest(folder, None, device="cpu"))

    def test_while_it_is_read(self, folder: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
        """What was read then is used once, and not kept."""
        read = opened_model.open_model
        changes = [folder / "config.json", next(folder.glob("*.safetensors"))]

        def changing(path: Path, *options: Any) -> Any:
            opened = read(path, *options)
            if changes:
                file = changes.pop()
                file.write_text(file.read_text() + "\n") if file.suffix == ".json" else file.touch()
            return opened

        monkeypatch.setattr(opened_model, "open_model", changing)
        for count in (1, 2, 3, 3):
            plan_model(PlanRequest(folder, None, device="cpu"))
            assert len(reads) == count


class TestEntry:
    @pytest.mark.parametrize("damage", ["empty", "half", "a byte", "JSON", "another's", "binary", "a folder"])
    def test_a_damaged_one_is_as_none(self, damage: str, folder: Path, reads: list[Path], cache: Path) -> None:
        expected = told(plan_model(PlanRequest(folder, Budget("4MiB"), device="cpu")))
        (entry,) = cache.iterdir()
        content = entry.read_bytes()
        head, _, body = content.partition(b"\n")
        wrong = {
            "empty": b"",
            "half": content[: len(content) // 2],
            "a byte": content.replace(b"[512,256]", b"[512,128]", 1),
            "JSON": b"[]\n[]",
            "another's": head.replace(b'"state": "', b'"state": "0') + b"\n" + body,
            "binary": os.urandom(1000),
        }
        assert damage == "a folder" or wrong[damage] != content
        entry.unlink()
        entry.mkdir() if damage == "a folder" else entry.write_bytes(wrong[damage])
        reads.clear()
        assert told(plan_model(PlanRequest(folder, Budget("4MiB"), device="cpu"))) == expected
        assert len(reads) == 1
        if damage != "a folder":
            assert entry.read_bytes() == content
        assert [file.name for file in cache.iterdir()] == [entry.name], "no draft is left"

    @pytest.mark.slow
    def test_a_forged_one_with_right_digests_is_as_none_or_ends_in_an_error_of_ours(
        self, folder: Path, reads: list[Path], cache: Path
    ) -> None:
        """Every kind of value at seeded places, by whoever can write the cache and knows how digests are made."""
        plan_model(PlanRequest(folder, Budget("4MiB"), device="cpu"))
        (entry,) = cache.iterdir()
        head, _, body = entry.read_bytes().partition(b"\n")
        key, draw = json.loads(head), random.Random(0)
        values = [None, True, -1, 0, 1, 3.5, 1 << 62, 1 << 70, "", "\ud800", "../../etc", [], {}, [[]]]
        for _ in range(250):
            record = json.loads(body)
            at = record
            while isinstance(at, list | dict) and at:
                place = draw.choice(list(at) if isinstance(at, dict) else range(len(at)))
                if not isinstance(at[place], list | dict) or not at[place] or draw.random() < 0.1:
                    at[place] = draw.choice(values)
                    break
                at = at[place]
            forged = json.dumps(record).encode()
            key["body"] = hashlib.sha256(forged).hexdigest()
            entry.write_bytes(json.dumps(key).encode() + b"\n" + forged)
            with contextlib.suppress(HeadraceError):
                plan_model(PlanRequest(folder, Budget("4MiB"), device="cpu"))
        assert 100 < len(reads) < 250, "most are refused, some hold something else that is possible"

    @pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["fifo", "device"])
    @pytest.mark.parametrize("where", ["the entry", "beside the model"])
    def test_what_is_no_file_is_not_read(
        self, make: Callable[[Path], object], where: str, folder: Path, reads: list[Path], cache: Path
    ) -> None:
        plan_model(PlanRequest(folder, None, device="cpu"))
        (entry,) = cache.iterdir()
        place = entry if where == "the entry" else folder / "config-other.json"
        place.unlink(missing_ok=True)
        make(place)
        assert plan_model(PlanRequest(folder, None, device="cpu")).plan.weight_bytes
        assert len(reads) == (2 if where == "the entry" else 1)

    def test_foreign_files_are_never_deleted(
        self, folder: Path, reads: list[Path], cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(metadata_cache, "_MOST_FILES", 1)
        elsewhere = folder.with_name("elsewhere")
        elsewhere.mkdir()
        (elsewhere / "package.json").write_text("{}")
        os.utime(elsewhere / "package.json", ns=(1, 1))
        cache.parent.mkdir(parents=True, exist_ok=True)
        cache.symlink_to(elsewhere)
        plan_model(PlanRequest(folder, None, device="cpu"))
        assert len(list(elsewhere.iterdir())) == 2
        assert (elsewhere / "package.json").exists()

    def test_those_used_last_are_kept(
        self, folder: Path, reads: list[Path], cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(metadata_cache, "_MOST_FILES", 2)
        links = [folder.with_name(f"link {number}") for number in range(3)]
        for number, link in enumerate(links):
            link.symlink_to(folder)
            plan_model(PlanRequest(link, None, device="cpu"))
            time.sleep(0.02)  # longer than the ticks in which file systems count time
            if number == 1:
                plan_model(PlanRequest(links[0], None, device="cpu"))  # used again, so the second goes first
        assert len(list(cache.iterdir())) == 2
        reads.clear()
        for link in (links[0], links[2], links[1]):
            plan_model(PlanRequest(link, None, device="cpu"))
        assert reads == [links[1]]

    def test_none_is_written_or_used_where_that_is_forbidden(
        self, folder: Path, reads: list[Path], cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plan_model(PlanRequest(folder, None, device="cpu"))
        (entry,) = cache.iterdir()
        monkeypatch.setenv("HEADRACE_DISABLE_CACHE", "1")
        plan_model(PlanRequest(folder, None, device="cpu"))
        assert len(reads) == 2
        entry.unlink()
        plan_model(PlanRequest(folder, None, device="cpu"))
        assert list(cache.iterdir()) == []

    def test_a_place_that_cannot_be_written(self, folder: Path, reads: list[Path], cache: Path) -> None:
        cache.parent.parent.write_text("a file in place of the folder")
        for count in (1, 2):
            assert plan_model(PlanRequest(folder, None, device="cpu")).plan.weight_bytes
            assert len(reads) == count

    def test_without_a_home(self, folder: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(metadata_cache, "cache_folder", lambda: None)
        for count in (1, 2):
            plan_model(PlanRequest(folder, None, device="cpu"))
            assert len(reads) == count


def test_the_files_are_still_opened(folder: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """As a plan that is carried out would: a file system may refuse direct reads."""
    flags = ["plan", str(folder), "--device", "cpu", "--device-memory", "4MiB", "--disk-direct"]
    plan_model(PlanRequest(folder, None, device="cpu"))

    monkeypatch.setattr(file_reads, "_open_direct", raising(OSError(22, "Invalid argument")))
    done = CliRunner().invoke(app, flags)
    assert done.exit_code == 2
    assert "may not support --disk-direct" in done.stderr
    assert len(reads) == 1


def test_what_is_known_of_torch_without_it() -> None:
    """The build is read from a file, or a kept probe would not be found."""
    assert machine_probe._torch_build()["__version__"] == torch.__version__
    assert bool(machine_probe._torch_build().get("cuda")) == (torch.version.cuda is not None)
    assert machine_probe.may_have_gpu() == torch.cuda.is_available()
