"""The promise: whoever computes a missed expert, the CPU or the GPU, a step has the resident model's bits, or raises.

Kernels run in Triton's interpreter, the doorbell and its pool as on a machine with a GPU.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import headrace
from cpu_experts import variant
from headrace.adapters.transformers import load
from headrace.adapters.transformers.shared_experts import CpuShare, share_experts
from headrace.errors import OptionError, StateError
from headrace.experts.cpu import native, pool, share
from headrace.testing import assert_same_bits
from moe_models import cached, gpt_oss, qwen
from quantised_checkpoints import FORMATS, resident

SHARES = {"none": [0], "a third": [0, 0, 1, 1], "all": list(range(65)), "measured": None}
# Of the pool's threads that the coordinator does not have, one that has taken a tile.
LOSE = """
static int lose;
void lose_next(int is_death) { lose = 1 + is_death; }
static void lose_now(void) { // once: a process has one library of one text
    int was = lose;
    lose = 0;
    if (was == 2) syscall(SYS_exit, 0);
    for (;;) pause();
}
static void take_tiles(pool *p) {"""
DIVIDE = """
int64_t share_of(int64_t missing, double cpu_s, double link_s) {
    mail box = {0};
    doorbell d = {.box = &box};
    for (int i = 0; i < 100; i++) add(&d.cpu, 1 + i % 3, cpu_s * (1 + i % 3)), add(&d.link, i % 4, link_s * (i % 4));
    divide(&d);
    return box.shares[missing];
}
"""


def inputs(*lengths: int) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    return [torch.randint(0, 97, (1, length), generator=made) for length in lengths]


def run(model: nn.Module, steps: list[torch.Tensor]) -> list[torch.Tensor]:
    with torch.inference_mode():
        return [model(step).logits for step in steps]


@contextmanager
def shared(model: nn.Module, shares: Any = None, slots: int = 3, cores: Any = (0, 1)) -> Iterator[CpuShare]:
    with headrace.offload(model, cached(slots)):
        yield share_experts(model, list(cores), shares)


@pytest.mark.slow
@pytest.mark.parametrize("shares", SHARES)
@pytest.mark.parametrize("build", [qwen, gpt_oss])
def test_bits(build: Any, shares: str) -> None:
    model, steps = build().bfloat16(), inputs(1, 2, 1, 8, 9)
    model.set_experts_implementation("headrace")
    expected = run(model, steps)
    with headrace.offload(model, cached(3)) as handle:
        each = share_experts(model, [0, 1], SHARES[shares])
        assert_same_bits(run(model, steps), expected)
        assert (each.doorbell.computed > 0) is (shares != "none")
        assert handle.stats().bytes_moved > 0
        each.remove()
        computed = each.doorbell.computed
        assert_same_bits(run(model, steps[:1]), expected[:1])
        assert each.doorbell.computed == computed
    assert_same_bits(run(model, steps[:1]), expected[:1])


@pytest.mark.slow
def test_bits_of_mxfp4_with_another_share_in_each_step(tmp_path: Path) -> None:
    FORMATS["MXFP4, experts"].write(tmp_path)
    plain, steps = resident(tmp_path), inputs(1, 3, 1, 2)
    plain.set_experts_implementation("headrace")
    expected = run(plain, steps)
    model, handle = load(tmp_path, cached(3), device="cpu", experts_implementation="headrace", cpu_experts=True)
    with handle:
        (each,) = handle._session.attachments
        assert isinstance(each, CpuShare)
        each.remove()
        each = share_experts(model, [0, 1], [0])
        made = torch.Generator().manual_seed(1)
        for step, logits in zip(steps, expected, strict=True):
            each.doorbell.shares.copy_(torch.randint(0, 4, each.doorbell.shares.shape, generator=made))
            assert_same_bits(run(model, [step]), [logits])
        assert each.doorbell.computed > 0


@pytest.mark.slow
def test_more_experts_than_slots() -> None:
    """Those of the CPU need no rows; others are read where they lie, or in overflow rows."""
    model, steps = qwen("headrace").bfloat16(), inputs(8, 5, 1)
    expected = run(model, steps)
    for shares in ([0, 0, 1, 1, 2, 2, 3, 3, 4], list(range(65))):
        with shared(model, shares, slots=1) as each:
            assert_same_bits(run(model, steps), expected)
            assert each.doorbell.computed > 0


@pytest.mark.slow
def test_what_the_cpu_computes_enters_no_slot() -> None:
    model, steps = qwen("headrace").bfloat16(), inputs(*[1] * 6)
    with headrace.offload(model, cached(4)) as handle:
        each = share_experts(model, [0], list(range(65)))
        run(model, steps)
        assert each.doorbell.computed == 2 * 2 * len(steps)
        assert not any(layer.hits or layer.fetched or layer.in_place for layer in handle.stats().experts)
        assert "experts on the CPU: 24 computed by 1 thread," in " ".join(handle.stats().notes)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("divided")
    with pytest.MonkeyPatch.context() as patch:
        (folder / "text.c").write_text(native._WHOLE.read_text() + DIVIDE)
        patch.setattr(native, "_WHOLE", folder / "text.c")
        built = variant(folder, more="")
    built.share_of.argtypes = ctypes.c_int64, ctypes.c_double, ctypes.c_double
    built.share_of.restype = ctypes.c_int64
    return built


class TestDivision:
    """The share that ends first: of n experts, so many on the CPU."""

    @pytest.mark.parametrize(
        ("cpu_us", "link_us", "shares"),
        [
            (100, 100, {1: 0, 2: 1, 3: 1, 8: 4}),
            (100, 200, {1: 1, 2: 1, 3: 2, 8: 5}),
            (300, 100, {1: 0, 2: 0, 4: 1, 8: 2}),
            (5000, 100, {1: 0, 8: 0, 32: 0}),
        ],
    )
    def test_by_times(self, cpu_us: float, link_us: float, shares: dict[int, int], library: Any) -> None:
        assert {n: library.share_of(n, cpu_us * 1e-6, link_us * 1e-6) for n in shares} == shares


@pytest.mark.slow
class TestFaults:
    @pytest.mark.parametrize("is_death", [False, True], ids=["stopped", "dead"])
    def test_a_lost_thread(self, is_death: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The step ends within a second with NaN; the next use raises, and the model runs without the share."""
        mark = "// What is read from here on stays"
        is_lost = "if (lose && pthread_equal(pthread_self(), p->seats[1].thread)) lose_now(); "
        planted = variant(tmp_path, {"static void take_tiles(pool *p) {": LOSE, mark: is_lost + mark}, more="")
        monkeypatch.setattr(pool, "library", lambda: planted)
        model, steps = qwen("headrace").bfloat16(), inputs(1, 1)
        expected = run(model, steps)
        with headrace.offload(model, cached(3)):
            each = share_experts(model, [0, 1], list(range(65)))
            assert_same_bits(run(model, steps[:1]), expected[:1])
            planted.lose_next(is_death)
            began = time.monotonic()
            with pytest.raises(StateError, match=r"a thread is dead or stopped, so .* are NaN: .* call remove\(\)"):
                run(model, inputs(*[4] * 40))
            assert time.monotonic() - began < 60
            each.remove()
            assert_same_bits(run(model, steps), expected)

    def test_no_answer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A coordinator that is gone: what waits gives up."""
        monkeypatch.setattr(share, "_MOST_POLLS", 50)
        model, steps = qwen("headrace").bfloat16(), inputs(1, 1)
        expected = run(model, steps)
        with headrace.offload(model, cached(3)):
            each = share_experts(model, [0, 1], list(range(65)))
            each.doorbell.stop()
            with pytest.raises(StateError, match="there was no answer for seconds"):
                run(model, steps)
            each.remove()
            assert_same_bits(run(model, steps), expected)

    def test_remove_beside_a_forward(self) -> None:
        model, steps = qwen("headrace").bfloat16(), inputs(*[1] * 4)
        expected = run(model, steps)
        with headrace.offload(model, cached(3)):
            each = share_experts(model, [0, 1], list(range(65)))
            found: list[Any] = []
            thread = threading.Thread(target=lambda: found.extend(run(model, steps)))
            thread.start()
            time.sleep(0.2)
            each.remove()
            thread.join()
        assert_same_bits(found, expected)

    def test_remove_after_the_offload_has_ended(self) -> None:
        with shared(qwen("headrace").bfloat16()) as each:
            pass
        each.remove()

    def test_a_forked_child(self) -> None:
        model = qwen("headrace").bfloat16()
        with shared(model) as each:
            child = os.fork()
            if child == 0:
                each.remove()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0


class TestRefused:
    def test_other_models(self) -> None:
        model = qwen("headrace").bfloat16()
        with pytest.raises(OptionError, match="expected an offloaded model with cached experts, found none"):
            share_experts(model)
        model.set_experts_implementation("grouped_mm")
        with (
            headrace.offload(model, cached(3)),
            pytest.raises(OptionError, match=r"found 'grouped_mm' for model\.layers"),
        ):
            share_experts(model)
        with headrace.offload(model, headrace.Prefetch(1, 1, 1)), pytest.raises(OptionError, match="found none"):
            share_experts(model)

    def test_another_dtype(self) -> None:
        model = qwen("headrace")
        with headrace.offload(model, cached(3)), pytest.raises(OptionError, match=r"found torch.float32"):
            share_experts(model)
