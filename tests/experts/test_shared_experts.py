"""The promise: whoever computes a missed expert, the CPU or the GPU, a step has the resident model's bits, or raises.

Kernels run in Triton's interpreter, the doorbell and its pool as on a machine with a GPU.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import headrace
from cpu_experts import variant
from headrace.adapters.transformers import load
from headrace.adapters.transformers.shared_experts import CpuShare, NoShare, share_experts
from headrace.errors import OptionError, OptionTypeError, StateError
from headrace.experts import cache
from headrace.experts.cpu import native, pool, share
from headrace.experts.kernels import ELSEWHERE
from headrace.experts.rows import IS_CHECKED
from headrace.plan import cpu_share
from headrace.plan.nominal_rates import NOMINAL_CPU
from headrace.testing import assert_same_bits
from headrace.transfer import machine_probe
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
EXIT = """
import os
os.environ["TRITON_INTERPRET"] = "1"
import torch
import headrace
from headrace.adapters.transformers.shared_experts import share_experts
from headrace.experts import ordered
from moe_models import cached, qwen
ordered.LAUNCHES.update(dict.fromkeys(ordered.LAUNCHES, (ordered.Launch(256, 1, 1), ordered.Launch(128, 1, 1))))
model = qwen("headrace").bfloat16()
handle = headrace.offload(model, cached(3))
share = share_experts(model, [0, 1], list(range(65)))
with torch.inference_mode():
    model(torch.ones(1, 1, dtype=torch.int64))
print("computed", share.doorbell.computed > 0, flush=True)
raise SystemExit(7)
"""
DIVIDE = """
int64_t share_of(int64_t missing, double cpu_s, double link_s) {
    mail box = {0};
    doorbell d = {.box = &box};
    for (int i = 0; i < 100; i++) add(&d.cpu, 1 + i % 3, cpu_s * (1 + i % 3)), add(&d.link, i % 4, link_s * (i % 4));
    divide(&d);
    return box.shares[missing];
}
// What is computed of requests with 1 to `most` missing experts in turn by a slow CPU, and by another when looked at
// again.
void learn_twice(double cpu_s, double then_s, double link_s, int64_t requests, int64_t most, int64_t *computed,
                 int64_t *shares) {
    mail box = {0};
    doorbell d = {.box = &box};
    divide(&d);
    for (int64_t again = 0; again < 2; again++, cpu_s = then_s) {
        if (again) d.off_since -= OFF_S, look_again(&d);
        for (int64_t i = 0; i < requests; i++) {
            int64_t missing = 1 + i * 5 % most, share = box.shares[missing];
            double cpu = share * cpu_s, link = (missing - share) * link_s;
            learn(&d, share, cpu, missing - share, cpu < link ? link : 0);
        }
        computed[again] = box.computed, shares[again] = box.shares[most];
    }
}
"""


def inputs(*lengths: int) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    return [torch.randint(0, 97, (1, length), generator=made) for length in lengths]


def run(model: nn.Module, steps: list[torch.Tensor]) -> list[torch.Tensor]:
    with torch.inference_mode():
        return [model(step).logits for step in steps]


def pinned_threads() -> int:
    """Those of pools, and none of torch's, which come and go."""
    return sum(len(os.sched_getaffinity(int(task))) == 1 for task in os.listdir("/proc/self/task"))


@contextmanager
def shared(model: nn.Module, shares: Any = None, slots: int = 3, cores: Any = (0, 1)) -> Iterator[CpuShare]:
    with headrace.offload(model, cached(slots)):
        yield share_experts(model, list(cores), shares)


@functools.cache
def resident_run(build: Any) -> tuple[nn.Module, list[torch.Tensor], list[torch.Tensor]]:
    """A model, steps, and its logits of them; kept, as the interpreter takes seconds for them."""
    model, steps = build().bfloat16(), inputs(1, 2, 1, 8, 9)
    model.set_experts_implementation("headrace")
    return model, steps, run(model, steps)


@pytest.mark.slow
@pytest.mark.parametrize("shares", SHARES)
@pytest.mark.parametrize("build", [qwen, gpt_oss])
def test_bits(build: Any, shares: str) -> None:
    model, steps, expected = resident_run(build)
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


@pytest.mark.parametrize("often", [0, 5])
def test_the_cpu_has_those_that_are_used_least(often: int) -> None:
    """Of two that are missing the other one enters a slot."""
    rows, seldom = torch.zeros(2 + 6, 16, dtype=torch.uint8), 5 - often

    class Share:
        shares, uses = torch.zeros(65, dtype=torch.int64), torch.zeros(2, 6, dtype=torch.int32)
        check = ring = staticmethod(lambda *_: None)

    each = cache.ExpertCache([rows], 2 + torch.arange(6), 2)
    each.share = Share()  # type: ignore[assignment]
    for ids in ([often, 1], [often, 2], [often, seldom], [1], [2]):
        each.admit(torch.tensor(ids), rows)
    Share.shares.fill_(1)
    found = dict(zip((0, 5), each.admit(torch.tensor([0, 5]), rows).tolist(), strict=True))
    assert found[seldom] == ELSEWHERE.value
    assert found[often] in (0, 1)
    assert each.admit(torch.tensor([seldom]), rows).tolist() == [ELSEWHERE.value]


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
        planned = cpu_share.shares(cpu_us, link_us, 32)
        assert {n: planned[n] for n in shares} == shares

    def test_the_plan_has_the_same_rule(self, library: Any) -> None:
        for cpu_us in (37, 91, 143, 210, 370, 900):
            planned = cpu_share.shares(cpu_us, 101, 16)
            assert planned == [0, *(library.share_of(n, cpu_us * 1e-6, 101e-6) for n in range(1, 17))]

    @pytest.mark.parametrize(("most", "share"), [(8, 5), (1, 1)])
    def test_a_slow_cpu_is_tried_for_a_moment_and_then_again(self, most: int, share: int, library: Any) -> None:
        """By five of its times and as many of the link, which has none of its own where the CPU is later.

        Where one expert is missing at a time the link has its times first.
        """
        computed, shares = torch.zeros(2, 2, dtype=torch.int64)
        us = ctypes.c_double(2000e-6), ctypes.c_double(100e-6), ctypes.c_double(180e-6)
        count = ctypes.c_int64(4096), ctypes.c_int64(most)
        library.learn_twice(*us, *count, *(ctypes.c_void_p(each.data_ptr()) for each in (computed, shares)))
        assert 5 <= computed[0] <= 2 * 5 + 8
        assert shares.tolist() == [0, share]


@pytest.mark.slow
class TestCores:
    """A core is left to Python."""

    @pytest.mark.parametrize(("cores", "threads"), [([0], 0), ([0, 1], 1), ([0, 1, 2], 2)])
    def test_default(self, cores: list[int], threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pool, "physical_cores", lambda: cores)
        model, steps = qwen("headrace").bfloat16(), inputs(1)
        expected = run(model, steps)
        with headrace.offload(model, cached(3)) as handle:
            each = share_experts(model)
            assert (each.doorbell.threads if isinstance(each, CpuShare) else 0) == threads
            assert_same_bits(run(model, steps), expected)
            assert handle.stats().bytes_moved > 0
            notes = " ".join(handle.stats().notes)
            assert ("experts on the CPU: off: this process may run on one physical core" in notes) is (threads == 0)
            each.remove()
            assert "experts on the CPU" not in " ".join(handle.stats().notes)

    def test_one_processor(self) -> None:
        own = os.sched_getaffinity(0)
        try:
            os.sched_setaffinity(0, {min(own)})
            assert pool.spare_cores() == []
        finally:
            os.sched_setaffinity(0, own)


@pytest.mark.slow
class TestAuto:
    """``cpu_experts="auto"``: as the plan expects, with a line that says why."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        qwen("headrace").bfloat16().save_pretrained(tmp_path)
        return tmp_path

    def notes(self, folder: Path, **options: Any) -> tuple[list[type], str]:
        how = {"device": "cpu", "experts_implementation": "headrace", "cpu_experts": "auto", **options}
        _, handle = load(folder, cached(3), **how)
        with handle:
            return [type(each) for each in handle._session.attachments], " ".join(handle.stats().notes)

    def test_no_rate(self, folder: Path) -> None:
        kinds, notes = self.notes(folder)
        assert kinds == [NoShare]
        assert "off: no rate of the CPU of a nominal CPU (no probe was run) is known: run `headrace probe`" in notes

    @pytest.mark.slow
    def test_without_one_an_offload_may_be_resized(self, folder: Path) -> None:
        how = {"device": "cpu", "experts_implementation": "headrace", "cpu_experts": "auto"}
        model, handle = load(folder, cached(3), **how)
        with handle:
            expected = run(model, inputs(1))
            handle.resize("1.2MB")
            before = handle.stats().bytes_moved
            assert all(map(torch.equal, run(model, inputs(1)), expected))
            assert handle.stats().bytes_moved > before
            assert "experts on the CPU: off: no rate of the CPU" in " ".join(handle.stats().notes)

    @pytest.mark.parametrize(("gb_per_s", "kind"), [(100.0, CpuShare), (0.01, NoShare)])
    def test_by_rate(self, gb_per_s: float, kind: type, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        rates = replace(NOMINAL_CPU, cpu_bytes_per_s={"bf16": gb_per_s * 1e9}, fetch_bytes_per_s=1e8)
        monkeypatch.setattr(machine_probe, "NOMINAL_CPU", rates)
        monkeypatch.setattr(pool, "physical_cores", lambda: [0, 1])
        kinds, notes = self.notes(folder)
        assert kinds == [kind]
        assert "tokens/s expected with the CPU's share in missed experts" in notes
        assert ("experts on the CPU: off: " in notes) is (kind is NoShare)

    def test_it_cannot_be(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """What ``True`` raises is the reason."""
        rates = replace(NOMINAL_CPU, cpu_bytes_per_s={"bf16": 1e11}, fetch_bytes_per_s=1e8)
        monkeypatch.setattr(machine_probe, "NOMINAL_CPU", rates)
        kinds, notes = self.notes(folder, experts_implementation="grouped_mm")
        assert kinds == [NoShare]
        assert "off: share_experts: expected experts_implementation='headrace', found 'grouped_mm'" in notes

    def test_refused(self, folder: Path) -> None:
        with pytest.raises(OptionTypeError, match="cpu_experts: expected True, False or 'auto', found 'on'"):
            self.notes(folder, cpu_experts="on")


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
            with pytest.raises(
                StateError, match=r"a thread is dead or stopped, so .* not computed: .* call remove\(\)"
            ):
                run(model, inputs(*[4] * 40))
            assert time.monotonic() - began < 60
            each.remove()
            assert_same_bits(run(model, steps), expected)

    def test_the_system_refuses_the_doorbell_a_thread(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Those of its pool end."""
        text, starts = native._WHOLE.read_text(), "!pthread_create(&d->thread, 0, attend, d)"
        assert starts in text
        (tmp_path / "text.c").write_text(text.replace(starts, "0"))
        with monkeypatch.context() as patch:
            patch.setattr(native, "_WHOLE", tmp_path / "text.c")
            refused = variant(tmp_path, more="")
        monkeypatch.setattr(pool, "library", lambda: refused)
        before = pinned_threads()
        model = qwen("headrace").bfloat16()
        with headrace.offload(model, cached(3)), pytest.raises(StateError, match="for another thread, or refused it"):
            share_experts(model, [0, 1])
        assert pinned_threads() == before

    @pytest.mark.parametrize("is_checked", [False, True])
    def test_no_answer(self, is_checked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """A coordinator that is gone: what waits gives up. Who checks may sample from what it then gets."""
        monkeypatch.setattr(share, "_MOST_POLLS", 50)
        model, steps = qwen("headrace", num_hidden_layers=1).bfloat16(), inputs(1, 1)
        expected = run(model, steps)
        with headrace.offload(model, cached(3)):
            each = share_experts(model, [0, 1], list(range(65)))
            each.doorbell.stop()
            token = IS_CHECKED.set(is_checked)
            (found,) = run(model, steps[:1])
            IS_CHECKED.reset(token)
            assert not torch.equal(found, expected[0])
            assert (found.isfinite().all(), found.isnan().all()) == (is_checked, not is_checked)
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
        """Nobody answers it: it is refused, and ends without a word to the threads of the parent, which go on."""
        model, steps = qwen("headrace").bfloat16(), inputs(1)
        expected = run(model, steps)
        with shared(model, SHARES["all"]) as each:
            assert_same_bits(run(model, steps), expected)
            child = os.fork()
            if child == 0:
                try:
                    run(model, steps)
                except StateError as error:
                    each.remove()
                    each.doorbell.stop()
                    os._exit(0 if "this process is a fork" in str(error) else 2)
                finally:
                    os._exit(1)
            assert os.waitpid(child, 0)[1] == 0
            assert_same_bits(run(model, steps), expected)
            assert each.doorbell.computed >= 8

    def test_an_interrupt_within_a_step(self) -> None:
        """At any moment of it, in kernels too: the next step is right."""
        model, steps = qwen("headrace").bfloat16(), inputs(1, 2, 1)
        expected = run(model, steps)

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        kept, count = signal.signal(signal.SIGALRM, interrupt), 0
        try:
            with shared(model, SHARES["a third"]) as each:
                run(model, steps)
                for delay_ms in range(5, 155, 25):
                    with suppress(KeyboardInterrupt):
                        try:
                            signal.setitimer(signal.ITIMER_REAL, delay_ms / 1e3)
                            run(model, steps)
                        except KeyboardInterrupt:
                            count += 1
                        finally:
                            signal.setitimer(signal.ITIMER_REAL, 0)
                    assert_same_bits(run(model, steps), expected)
                assert count >= 3
                assert each.doorbell.computed > 0
        finally:
            signal.signal(signal.SIGALRM, kept)

    def test_an_interrupt_between_an_admission_and_its_copy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What was admitted is not in its slot: the next step fetches it again."""
        model, steps = qwen("headrace").bfloat16(), inputs(1, 1)
        expected = run(model, steps)

        class Interrupted:
            def __getitem__(self, _: object) -> Any:
                raise KeyboardInterrupt

        with headrace.offload(model, cached(4)) as handle:
            with monkeypatch.context() as patch:
                patch.setattr(cache, "fetch_kernel", Interrupted())
                with pytest.raises(KeyboardInterrupt):
                    run(model, steps)
            assert_same_bits(run(model, steps), expected)
            assert handle.stats().experts[0].fetched > 0

    def test_nobody_removes_it(self) -> None:
        """Threads end with the last reference, or would read memory that is gone."""
        model, before = qwen("headrace").bfloat16(), pinned_threads()
        handle = headrace.offload(model, cached(3))
        each = share_experts(model, [0, 1], SHARES["all"])
        run(model, inputs(1))
        assert pinned_threads() == before + 2
        del model, handle, each
        gc.collect()
        assert pinned_threads() == before

    def test_exit(self) -> None:
        """With threads that nobody has ended, and with the code that the process chose."""
        command = [sys.executable, "-c", EXIT]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=env)
        assert (done.returncode, done.stdout.splitlines()) == (7, ["computed True"]), done.stderr

    def test_cores_taken_away(self) -> None:
        """All threads on one processor, as a control group may have it from some moment on: slower, and right."""
        model, steps, own = qwen("headrace").bfloat16(), inputs(1, 2, 1), os.sched_getaffinity(0)
        expected = run(model, steps)
        with shared(model, SHARES["all"]) as each:
            assert_same_bits(run(model, steps), expected)
            tasks = [int(task) for task in os.listdir("/proc/self/task")]
            try:
                for task in tasks:
                    os.sched_setaffinity(task, {min(own)})
                assert_same_bits(run(model, steps), expected)
            finally:
                for task in tasks:
                    os.sched_setaffinity(task, own)
            assert each.doorbell.computed > 0

    def test_processes_on_the_same_cores(self) -> None:
        model, steps = qwen("headrace").bfloat16(), inputs(1, 2, 1)
        expected = run(model, steps)
        others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
        try:
            with shared(model, SHARES["all"]) as each:
                assert_same_bits(run(model, steps), expected)
                assert each.doorbell.computed > 0
        finally:
            for other in others:
                other.kill()
                other.wait()


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
