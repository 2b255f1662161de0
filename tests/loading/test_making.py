"""The promise: what a checkpoint holds rearranged is made tensor by tensor, never twice, with the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import headrace
from checkpoints import assert_same_tensors, environment, resident, run, save_transposed
from headrace.adapters.transformers import build_meta_model, load
from headrace.adapters.transformers.conversion import match
from headrace.checkpoint.safetensors_header import Checkpoint
from headrace.checkpoint.weight_map import Conversion
from headrace.errors import HeadraceWarning, TransferError
from headrace.runtime.prepare import Prepared
from headrace.stores.file_reads import DiskOptions, ReadCounter
from headrace.stores.loader import TensorConverter
from headrace.stores.sources import Copy, writable_view
from registrars import Ledger, pin_by
from shm_ranks import ranks

EXPERTS = "model.language_model.layers.1.mlp.experts.gate_up_proj"


@pytest.fixture(scope="module")
def transposed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_transposed(tmp_path_factory.mktemp("transposed"), 3)


def experts(mode: str) -> headrace.Prefetch:
    return headrace.Prefetch(mode=mode, prefetch_step=2, params=["experts"])  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore::headrace.errors.HeadraceWarning")
class TestSameBits:
    @pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "plain"])
    def test_made_into_host_memory(self, transposed: Path, pinned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        if pinned:
            pin_by(Ledger(), monkeypatch)
        monkeypatch.setattr("headrace.stores.loader._LIVE_PIECE_BYTES", 1 << 14)
        reference = resident(transposed)
        seen: list[tuple[int, int]] = []
        model, handle = load(transposed, experts("cpu"), progress=lambda done, total: seen.append((done, total)))
        assert handle.plan.mechanism_of(EXPERTS) == "prefetch"
        assert torch.equal(run(model), run(reference))
        total = seen[0][1]
        assert (seen[0], seen[-1]) == ((0, total), (total, total))
        assert total > 0.99 * handle.plan.weight_bytes  # not what the model computes for itself
        assert len({done for done, _ in seen}) > 6, "each of the six made tensors was told of"
        handle.remove()
        assert_same_tensors(model, reference)

    @pytest.mark.parametrize("mode", ["cpu", "disk"])
    def test_another_dtype_than_stored(self, transposed: Path, mode: str) -> None:
        reference = resident(transposed, dtype=torch.bfloat16)
        policy: Any = experts("cpu") if mode == "cpu" else "1GiB"
        model, handle = load(transposed, policy, dtype=torch.bfloat16)
        assert torch.equal(run(model), run(reference))
        assert handle.plan.mechanism_of(EXPERTS) == ("prefetch" if mode == "cpu" else "resident")
        read = handle.stats().loading
        assert read.direct + read.cached + read.buffered >= 1.99 * handle.plan.weight_bytes, "float32 was read"
        handle.remove()
        assert_same_tensors(model, reference)

    def test_nothing_is_made_before_the_offload(self, transposed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The model has no bytes for them when the store is opened."""
        empty: list[bool] = []
        plain = headrace.api.start

        def start(prepared: Prepared, **options: Any) -> Any:
            empty.append(prepared.model.get_parameter(EXPERTS).is_meta)
            return plain(prepared, **options)

        monkeypatch.setattr("headrace.adapters.transformers.load_folder.start", start)
        for policy in (experts("cpu"), "1GiB"):
            load(transposed, policy)[1].remove()
        assert empty == [True, True]

    @pytest.mark.slow
    def test_ranks_share_what_one_of_them_makes(self, transposed: Path, tmp_path: Path) -> None:
        with ranks(2, tmp_path, load_shared, str(transposed)) as both:
            found = [one.hear() for one in both]
        expected = run(resident(transposed))
        for logits, shared, offloaded in found:
            assert torch.equal(torch.tensor(logits), expected)
            assert shared >= offloaded > 0


def load_shared(rank: int, talk: Any, folder: str) -> Any:
    import warnings

    import torch.distributed as dist

    warnings.simplefilter("ignore", HeadraceWarning)
    model, handle = load(folder, experts("shm_cpu"), group=dist.group.WORLD)
    return run(model).tolist(), handle.stats().store_bytes["host_shared"], handle.plan.offloaded_bytes


class TestMaker:
    """One recipe at a time."""

    def test_what_was_made_is_let_go_of_before_the_next(self, tmp_path: Path) -> None:
        parts = {f"p{i}": torch.full((8, 8), float(i)) for i in range(12)}
        save_file(parts, tmp_path / "model.safetensors")
        checkpoint = Checkpoint.open(tmp_path)
        alive: list[weakref.ref[torch.Tensor]] = []
        most = 0

        def made(tensors: Mapping[str, torch.Tensor], i: int) -> dict[str, torch.Tensor]:
            nonlocal most
            alive.extend(weakref.ref(tensor) for tensor in tensors.values())
            most = max(most, sum(ref() is not None for ref in alive))
            first, second = (tensors[f"p{2 * i + k}"] for k in range(2))
            return {f"sum{i}": first + second, f"turned{i}": first.t().contiguous() - second}

        recipes = {}
        for i in range(6):
            inputs = tuple(checkpoint[f"p{2 * i + k}"] for k in range(2))
            recipe = Conversion((f"sum{i}", f"turned{i}"), inputs, lambda tensors, i=i: made(tensors, i))  # type: ignore[misc]
            recipes |= {f"store.{name}": (name, recipe) for name in recipe.names}
        shuffled = dict(sorted(recipes.items()))  # all sums, then all that was turned
        counter = ReadCounter()
        maker = TensorConverter(shuffled, DiskOptions(), counter, num_threads=2)
        assert sorted(maker.order) == sorted(shuffled)
        for name in maker.order:
            (copy,) = maker.copies(name)
            buffer = bytearray(copy.num_bytes)
            copy.src.read(memoryview(buffer))
            i = int(name[-1])
            expected = torch.full((8, 8), 4.0 * i + 1 if "sum" in name else -1.0)
            assert bytes(buffer) == bytes(writable_view(expected.view(torch.uint8).reshape(-1)))
        maker.close()
        assert counter.stats.buffered == 12 * 256, "every part once"
        assert most == 2, "the parts of one recipe"

    def test_a_file_written_to_since_is_refused(self, tmp_path: Path) -> None:
        save_file({"p": torch.ones(8, 8)}, tmp_path / "model.safetensors")
        checkpoint = Checkpoint.open(tmp_path)
        recipe = Conversion(("t",), (checkpoint["p"],), lambda tensors: {"t": tensors["p"].t().contiguous()})
        maker = TensorConverter(
            {"t": ("t", recipe)}, DiskOptions(), ReadCounter(), num_threads=1, stamps=checkpoint.stamps
        )
        os.utime(tmp_path / "model.safetensors", ns=(1, 1))
        with pytest.raises(TransferError, match="it was written to while in use"):
            maker.copies("t")
        maker.close()

    def test_copies_cover_the_tensor(self, transposed: Path) -> None:
        weights = match(build_meta_model(transposed), Checkpoint.open(transposed)).weights
        assert EXPERTS in weights.recipes
        assert EXPERTS not in weights.sources
        recipe = weights.recipes[EXPERTS]
        maker = TensorConverter({EXPERTS: (EXPERTS, recipe)}, DiskOptions(), ReadCounter(), num_threads=1)
        (copy,) = maker.copies(EXPERTS)
        assert isinstance(copy, Copy)
        assert copy.num_bytes == resident(transposed).get_parameter(EXPERTS).nbytes
        maker.close()


GROWTH = """
import json, sys, warnings
import torch, torch.distributed as dist, transformers, headrace
from headrace.adapters.transformers import load
from headrace.errors import HeadraceWarning
from headrace.memory.system import PeakMeter, rss_bytes

transformers.logging.disable_progress_bar()
warnings.simplefilter("ignore", HeadraceWarning)
small, big, meeting = sys.argv[1:]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
policy = headrace.Prefetch(mode="shm_cpu", params=["experts"])
load(small, policy, group=dist.group.WORLD)[1].remove()  # imports and pools that any first use costs
meter = PeakMeter()
model, handle = load(big, policy, group=dist.group.WORLD)
peak, plan = meter.growth_bytes(), handle.plan
largest = max(parameter.nbytes for parameter in model.parameters())
print(json.dumps([peak, plan.offloaded_bytes, plan.resident_bytes, sum(plan.slot_bytes), largest]))
"""


class TestMemory:
    @pytest.mark.slow
    def test_the_model_is_never_there_twice(self, transposed: Path, tmp_path: Path) -> None:
        """Experts made for a store that ranks share: one copy and a few tensors, not one copy more."""
        sizes = {"hidden_size": 256, "moe_intermediate_size": 512, "num_experts": 16}
        big = save_transposed(tmp_path / "big", 10, **sizes)
        command = [sys.executable, "-c", textwrap.dedent(GROWTH), str(transposed), str(big), str(tmp_path / "meeting")]
        done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
        assert done.returncode == 0, done.stderr
        peak, offloaded, remaining, slots, largest = json.loads(done.stdout.splitlines()[-1])
        bound = 1.01 * (offloaded + remaining) + slots + 4 * largest + (32 << 20)
        assert bound < 1.7 * offloaded, "a second copy would not fit into it"
        assert offloaded < peak <= bound
