"""The promise: the same bits as the resident model (contract 1), while copies and compute really run side by side.

Copies are stretched by random delays and layers sleep for random times, so that every run interleaves differently. No
test trusts equal outputs alone: each asserts what moved, how much, and by which mechanism (trap 2).
"""

from __future__ import annotations

import random
import signal
import threading
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import headrace
from checks import require_forwards, run_threads
from headrace import UVA, Budget, DiskOptions, Prefetch
from headrace.errors import HeadraceWarning, StateError
from headrace.testing import SlowLink, assert_moved, assert_same_bits, offload_over
from headrace.transfer.link import ThreadLink
from models import DIM, Block, MoE, OddStack, QuantStack, ScaledStack, Stack, aligned, all_layers, expecting, rows, save
from peers import stand_in

MODELS: list[tuple[Callable[[], nn.Module], torch.Tensor]] = [
    (lambda: Stack(5, max_pause_s=0.001), rows()),
    (lambda: QuantStack(5), rows()),
    (lambda: MoE(5), torch.arange(9)),
    (lambda: OddStack(5), rows()),
    (lambda: ScaledStack(5), rows()),
]
IDS = ["dense", "quantised", "experts", "odd", "subclass"]


@pytest.fixture(autouse=True)
def _no_grad_and_two_threads() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)  # a kernel, too, may share its work out among threads
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)


class TestEager:
    @pytest.mark.parametrize(("build", "x"), MODELS, ids=IDS)
    @pytest.mark.parametrize("slots", [1, 2, 3, 5])
    def test_every_model_and_number_of_slots(self, build: Callable[[], nn.Module], x: torch.Tensor, slots: int) -> None:
        model = build().eval()
        expected = model(x)
        handle = offload_over(model, all_layers(slots), SlowLink(seed=slots))
        require_forwards(handle, x, expected, 3)
        handle.remove()
        assert_same_bits(model(x), expected)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
    def test_dtypes(self, dtype: torch.dtype) -> None:
        model = Stack(4).eval().to(dtype)
        x = rows().to(dtype)
        expected = model(x)
        with headrace.offload(model, all_layers()) as handle:
            require_forwards(handle, x, expected, 1)

    @pytest.mark.parametrize(
        "policy",
        [
            Prefetch(group_size=3, num_in_group=1, params=["layers"]),
            Prefetch(group_size=4, num_in_group=3, prefetch_step=2, params=["linear"]),
            all_layers(12),
            Budget("300KiB"),
            Budget("450KiB", ["linear"]),
            Budget("760KiB"),
            Budget("450KiB", peer_memory="250KiB"),
        ],
        ids=["every third", "three of four", "a slot each", "smallest", "even spread", "barely", "some on a peer"],
    )
    def test_policies(self, policy: headrace.Prefetch | headrace.Budget) -> None:
        model, x, expected = expecting(Stack(12, dim=128, max_pause_s=0.001), rows(128))
        with stand_in():
            handle = offload_over(model, policy, SlowLink())
        assert handle.plan.prefetched_bytes > 0
        assert bool(handle.plan.peer_bytes) == bool(getattr(policy, "peer_memory", None))
        require_forwards(handle, x, expected, 2)
        handle.remove()

    def test_one_layer_used_again_and_again(self) -> None:
        """Shared layers: every unit runs several times per forward, in turn."""
        shared = Block(DIM)
        model, x, expected = expecting(nn.Sequential(nn.Linear(DIM, DIM), *[shared] * 4))
        handle = offload_over(model, Prefetch(params=["ALL_MODEL_PARAMS"]), SlowLink(max_delay_s=0.001))
        for _ in range(3):
            assert_same_bits(model(x), expected)
        assert handle.stats().bytes_moved > 3 * handle.plan.prefetched_bytes
        assert max(unit.runs for unit in handle.stats().units) == 12
        handle.remove()

    @pytest.mark.slow
    def test_layers_wrapped_by_the_compiler(self) -> None:
        model, x, expected = expecting(Stack(4))
        for index, layer in enumerate(model.layers):
            model.layers[index] = torch.compile(layer, backend="eager")
        for _ in range(2):
            with headrace.offload(model, all_layers(2)) as handle:
                require_forwards(handle, x, expected, 2)

    def test_all_of_it(self) -> None:
        """Modules outside the layers too, each as a unit of its own; a lookup table is read in place."""
        model, x, expected = expecting(
            nn.Sequential(nn.Embedding(50, DIM), Stack(3), nn.Linear(3, 4000)), torch.arange(9)
        )
        with headrace.offload(model, Budget("70KiB", ["ALL_MODEL_PARAMS"])) as handle:
            require_forwards(handle, x, expected, 1)
            assert handle.plan.mechanism_of("0.weight") == "uva"

    def test_a_table_that_is_read_again_without_a_call(self) -> None:
        """Weights tied by use and not as tensors: nobody announces the second read."""

        class Tied(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embed = nn.Embedding(700, DIM)
                self.stack = Stack(5)
                self.stack.head = nn.Identity()

            def forward(self, tokens: torch.Tensor) -> torch.Tensor:
                return self.stack(self.embed(tokens)) @ self.embed.weight.t()

        model, tokens, expected = expecting(Tied(), torch.arange(9))
        with headrace.offload(model, Budget("12KiB", ["ALL_MODEL_PARAMS"])) as handle:
            require_forwards(handle, tokens, expected, 2)

    def test_attention_that_reads_its_childs_weight(self) -> None:
        model = nn.MultiheadAttention(DIM, 4).eval()
        x = rows().unsqueeze(1)
        expected = model(x, x, x)
        with headrace.offload(model, Prefetch(params=["ALL_MODEL_PARAMS"])) as handle:
            for _ in range(3):
                assert_same_bits(model(x, x, x), expected)
            assert [unit.module_fqn for unit in handle.plan.units] == [""]

    def test_attention_beside_other_modules(self) -> None:
        """Its norms run in another order than they are declared in."""
        model, x, expected = expecting(nn.TransformerEncoderLayer(DIM, 4, 64, batch_first=True), rows().unsqueeze(0))
        with headrace.offload(model, Prefetch(params=["ALL_MODEL_PARAMS"])) as handle:
            for _ in range(3):
                assert_same_bits(model(x), expected)
            assert handle.stats().bytes_moved > 3 * handle.plan.prefetched_bytes

    @pytest.mark.parametrize("kind", ["layer", "stack"])
    @pytest.mark.parametrize("params", ["ALL_MODEL_PARAMS", "re:.*linear.*"])
    def test_the_fast_path_of_encoder_layers(self, kind: str, params: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """torch leaves it for hooks, and rounds otherwise: under autocast of a CPU to another dtype."""
        layer = nn.TransformerEncoderLayer(DIM, 4, 64, batch_first=True, activation="gelu").eval()
        model = layer if kind == "layer" else nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
        x, calls, fast = rows().unsqueeze(0), [], torch._transformer_encoder_layer_fwd
        monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", lambda *a: (calls.append(1), fast(*a))[1])
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            expected, num_calls = model(x), len(calls)
            with warnings.catch_warnings(), headrace.offload(model, Prefetch(1, 1, 1, params=[params])) as handle:
                warnings.simplefilter("ignore", HeadraceWarning)  # with units within a layer the fast path reads them
                for _ in range(3):
                    assert_same_bits(model(x), expected)
                assert handle.stats().bytes_moved > 0
        assert expected.dtype == torch.bfloat16
        assert len(calls) == 4 * num_calls > 0

    @pytest.mark.parametrize("made_in", [torch.inference_mode, torch.no_grad])
    @pytest.mark.parametrize("offloaded_in", [torch.inference_mode, torch.no_grad])
    def test_inference_mode(self, made_in: Any, offloaded_in: Any) -> None:
        with made_in():
            model = Stack(4).eval()
        x = rows()
        expected = model(x)
        with offloaded_in():
            handle = headrace.offload(model, all_layers())
        for forwards, mode in enumerate((torch.inference_mode, torch.no_grad, torch.inference_mode), start=1):
            with mode():
                assert_same_bits(model(x), expected)
            assert_moved(handle, forwards)
        handle.remove()
        assert model.head.weight.is_inference() == model.layers[0].linear.weight.is_inference()
        assert_same_bits(model(x), expected)

    def test_uva_reads_in_place(self) -> None:
        model, tokens, expected = expecting(MoE(3), torch.arange(9))
        with headrace.offload(model, UVA(params=["experts"])) as handle:
            assert_same_bits(model(tokens), expected)
            stats = handle.stats()
        assert stats.bytes_moved == 0
        assert stats.mechanism_bytes["uva"] == 3 * 2 * 4 * DIM * DIM * 4
        assert handle.plan.mechanism_of("layers.0.mlp.experts.up_proj") == "uva"


@pytest.mark.parametrize("mode", ["cpu", "disk"])
def test_the_reference_lies_at_multiples_of_64(mode: Any, tmp_path: Path) -> None:
    """Where weights in mapped files lie, some CPUs round products of the resident model otherwise."""
    path, x = save(Stack(3).eval(), tmp_path) / "model.safetensors", rows()
    model, reference = Stack(3).eval(), Stack(3).eval()
    for each in (model, reference):
        each.load_state_dict(load_file(path), assign=True)
        each.layers[1].linear.weight = each.layers[0].linear.weight
    assert any(weight.data_ptr() % 64 for weight in reference.parameters())
    aligned(reference)
    assert not any(weight.data_ptr() % 64 for weight in reference.parameters())
    assert reference.layers[1].linear.weight is reference.layers[0].linear.weight
    with headrace.offload(model, all_layers(2, mode), checkpoint=path if mode == "disk" else None) as handle:
        assert_same_bits(model(x), reference(x))
        assert_moved(handle, 1)
    assert_same_bits(model(x), reference(x))


@pytest.mark.parametrize("codec", ["none", "exp3"])
@pytest.mark.parametrize("peer", [None, "200KiB"])
def test_host_memory_is_host_memory_whatever_the_default_device(codec: Any, peer: str | None) -> None:
    """``torch.set_default_device("cuda")``, for which ``meta`` stands: neither can be read as host memory."""
    model, x = Stack(8, 256).eval().bfloat16(), rows(256).bfloat16()
    expected, state = model(x), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    budget = Budget(sum(each.nbytes for each in state.values()) * 4 // 5, mode="cpu", peer_memory=peer, codec=codec)
    with stand_in(), warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore", HeadraceWarning)
        with headrace.offload(model, budget) as handle:
            for _ in range(2):
                assert_same_bits(model(x), expected)
            assert handle.stats().bytes_moved
            name = handle.plan.units[0].entries[0].storage
            assert_same_bits(model.get_parameter(name) * 2, state[name] * 2)
            assert_same_bits(dict(model.state_dict()), state)
    assert_same_bits(model(x), expected)


class TestDisk:
    @pytest.mark.parametrize("num_shards", [1, 3])
    @pytest.mark.parametrize(
        "options", [DiskOptions(), DiskOptions(direct=True), DiskOptions(drop_cache=True)], ids=str
    )
    def test_prefetch(self, tmp_path: Path, num_shards: int, options: DiskOptions) -> None:
        model, x, expected = expecting(Stack(5, max_pause_s=0.001))
        folder = save(model, tmp_path, num_shards)
        handle = offload_over(model, all_layers(2, "disk"), SlowLink(), checkpoint=folder, disk=options)
        assert handle.plan.mode == "disk"
        require_forwards(handle, x, expected, 3)
        handle.remove()
        assert_same_bits(model(x), expected)

    def test_units_larger_than_a_piece_and_than_the_bounce_buffer(self, tmp_path: Path) -> None:
        """Three pieces of 2 MiB and a bit; reads past the page cache go through a buffer of 1 MiB."""
        model = nn.Sequential(
            *(nn.Linear(1100, 1301) if i % 2 == 0 else nn.Linear(1301, 1100) for i in range(3))
        ).eval()
        x = rows(1100)
        expected = model(x)
        policy = Prefetch(params=["ALL_MODEL_PARAMS"], mode="disk")
        for options in (DiskOptions(), DiskOptions(direct=True, drop_cache=True)):
            with headrace.offload(model, policy, checkpoint=save(model, tmp_path), disk=options) as handle:
                assert max(unit.num_bytes for unit in handle.plan.units) > 2 * (2 << 20)
                require_forwards(handle, x, expected, 1)

    @pytest.mark.parametrize("mode", ["cpu", "disk"])
    def test_from_meta(self, tmp_path: Path, mode: str) -> None:
        """A model that has never been in memory: residents are read once, the rest comes unit by unit."""
        source = MoE(4).eval()
        tokens = torch.arange(9)
        expected = source(tokens)
        folder = save(source, tmp_path)
        with torch.device("meta"):
            model = MoE(4).eval()
        seen: list[tuple[int, int]] = []
        handle = headrace.offload(
            model, all_layers(2, mode), checkpoint=folder, progress=lambda done, total: seen.append((done, total))
        )
        require_forwards(handle, tokens, expected, 2)
        loaded = handle.plan.weight_bytes if mode == "cpu" else handle.plan.resident_bytes
        assert seen[0] == (0, loaded)
        assert seen[-1] == (loaded, loaded)
        assert model.head.weight is model.embed.weight
        handle.remove()
        assert_same_bits(model(tokens), expected)
        assert not any(tensor.is_meta for tensor in model.state_dict().values())

    def test_from_meta_with_a_tensor_without_elements(self, tmp_path: Path) -> None:
        class Prefixed(Stack):
            def __init__(self) -> None:
                super().__init__(4, dim=DIM)
                self.register_buffer("prefix", torch.empty(0, DIM))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(torch.cat([self.prefix, x]))

        source, x = Prefixed().eval(), torch.randn(2, DIM)
        with torch.device("meta"):
            model = Prefixed().eval()
        handle = headrace.offload(model, all_layers(2, "disk"), checkpoint=save(source, tmp_path))
        require_forwards(handle, x, source(x), 2)
        handle.remove()
        assert_same_bits(model(x), source(x))

    def test_a_lookup_table_is_read_from_the_file(self, tmp_path: Path) -> None:
        model = nn.Sequential(nn.Embedding(4000, DIM), Stack(4, dim=DIM)).eval()
        x = torch.tensor([0, 3999, 17])
        expected = model(x)
        with headrace.offload(model, "40KiB", checkpoint=save(model, tmp_path)) as handle:
            assert handle.plan.uva == {"0.weight": 4000 * DIM * 4}
            assert_same_bits(model(x), expected)
            assert handle.stats().bytes_moved == 0

    @pytest.mark.slow
    def test_budget_from_a_checkpoint_streams_from_its_files(self, tmp_path: Path) -> None:
        model, x, expected = expecting(Stack(12, dim=128), rows(128))
        with headrace.offload(model, "400KiB", checkpoint=save(model, tmp_path)) as handle:
            assert handle.plan.mode == "disk"
            assert handle.plan.device_bytes <= 400 * 2**10
            require_forwards(handle, x, expected, 2)


class TestOrder:
    """Trap 10: what runs is up to the model; a unit that is not where the schedule wants it is fetched on the spot."""

    @pytest.mark.parametrize("order", [[0, 2, 3, 4], [0, 1, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2], []], ids=str)
    @pytest.mark.parametrize("slots", [1, 2, 5])
    def test_skipped_repeated_backwards(self, order: list[int], slots: int) -> None:
        model = Stack(5, max_pause_s=0.0005).eval()
        model.order = order
        x = rows()
        expected = model(x)
        handle = offload_over(model, all_layers(slots), SlowLink(max_delay_s=0.001))
        for _ in range(3):
            assert_same_bits(model(x), expected)
        stats = handle.stats()
        assert [unit.runs for unit in stats.units] == [3 * order.count(index) for index in range(5)]
        assert (stats.misses > 0) == (slots < 5 and order != [])
        assert stats.misses <= 3 * len(order)
        handle.remove()

    def test_order_that_changes_from_call_to_call(self) -> None:
        model = Stack(7).eval()
        x = rows()
        orders = [torch.randperm(7).tolist()[: 1 + index % 7] for index in range(12)]
        expected = []
        for model.order in orders:
            expected.append(model(x))
        handle = offload_over(model, all_layers(3), SlowLink(max_delay_s=0.001))
        for model.order, output in zip(orders, expected, strict=True):
            assert_same_bits(model(x), output)
        assert handle.stats().misses > 0
        assert handle.stats().bytes_moved > 7 * handle.plan.units[0].payload_bytes
        handle.remove()

    @pytest.mark.filterwarnings("error")
    def test_a_layer_that_never_runs_is_no_news(self) -> None:
        model = Stack(5).eval()
        model.order = [0, 1, 3, 4]
        expected = model(rows())
        with headrace.offload(model, all_layers()) as handle:
            assert_same_bits(model(rows()), expected)
            assert handle.stats().units[2].runs == 0

    def test_a_part_of_the_model_called_by_itself(self) -> None:
        model, x, expected = expecting(Stack(5))
        alone = model.layers[3](x)
        with headrace.offload(model, all_layers()) as handle:
            assert_same_bits(model.layers[3](x), alone)
            assert_same_bits(model(x), expected)
            assert handle.stats().units[3].runs == 2


class TestSeveral:
    def test_two_offloaded_models_in_one_process(self) -> None:
        first, second = Stack(5, max_pause_s=0.0005).eval(), MoE(4).eval()
        x, tokens = rows(), torch.arange(9)
        expected = first(x), second(tokens)
        one = offload_over(first, all_layers(2), SlowLink(seed=1))
        two = offload_over(second, all_layers(3), SlowLink(seed=2))
        for forwards in (1, 2):
            assert_same_bits((first(x), second(tokens)), expected)
            assert_moved(one, forwards)
            assert_moved(two, forwards)
        one.remove()
        assert_same_bits((first(x), second(tokens)), expected)
        two.remove()

    def test_two_models_that_share_a_tensor_offload_one_after_the_other_only(self) -> None:
        first, second = Stack(3).eval(), Stack(3).eval()
        second.layers[0].linear.weight = first.layers[0].linear.weight
        x = rows()
        expected = first(x), second(x)
        with headrace.offload(first, all_layers()):
            assert_same_bits(first(x), expected[0])
        with headrace.offload(second, all_layers()):
            assert_same_bits(second(x), expected[1])
        assert_same_bits((first(x), second(x)), expected)

    @pytest.mark.slow
    @pytest.mark.parametrize("slots", [1, 2, 3])
    def test_two_threads_at_the_same_time(self, slots: int) -> None:
        model = Stack(5, max_pause_s=0.001).eval()
        inputs = [torch.randn(4, DIM) for _ in range(3)]
        expected = [model(x) for x in inputs]
        handle = offload_over(model, all_layers(slots), SlowLink(max_delay_s=0.001, seed=slots))
        problems: list[BaseException] = []

        def work(x: torch.Tensor, output: torch.Tensor) -> None:
            try:
                with torch.no_grad():
                    for _ in range(6):
                        assert_same_bits(model(x), output)
            except BaseException as error:
                problems.append(error)

        run_threads([partial(work, *pair) for pair in zip(inputs, expected, strict=True)])
        assert problems == []
        stats = handle.stats()
        assert [unit.runs for unit in stats.units] == [18] * 5
        assert stats.bytes_moved >= 6 * handle.plan.moved_bytes
        handle.remove()

    def test_threads_in_turn(self) -> None:
        """Trap 5: a warm-up in one thread and the loop in another."""
        model, x, expected = expecting(Stack(5))
        handle = offload_over(model, all_layers(), SlowLink())
        outputs: list[torch.Tensor] = []
        for _ in range(4):
            thread = threading.Thread(target=lambda: outputs.append(model(x).detach()))
            thread.start()
            thread.join(60)
            outputs.append(model(x))
        for output in outputs:
            assert_same_bits(output, expected)
        assert_moved(handle, 8)
        handle.remove()


class Failing(nn.Module):
    """Raises in the middle of a forward when told to."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.error: BaseException | None = None
        self.before = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.error is not None and self.before:
            raise self.error
        x = self.inner(x)
        if self.error is not None:
            raise self.error
        return x


@pytest.mark.filterwarnings("error::headrace.HeadraceWarning")
class TestInterrupted:
    @pytest.mark.parametrize(("error", "at"), [(ValueError("mine"), 0), (KeyboardInterrupt(), 2), (SystemExit(), 4)])
    @pytest.mark.parametrize("slots", [1, 2])
    @pytest.mark.parametrize("before", [True, False])
    def test_a_forward_that_raises(self, error: BaseException, at: int, slots: int, before: bool) -> None:
        model, x, expected = expecting(Stack(5))
        model.layers[at] = Failing(model.layers[at])
        handle = offload_over(model, all_layers(slots), SlowLink(max_delay_s=0.001))
        assert_same_bits(model(x), expected)
        model.layers[at].error, model.layers[at].before = error, before
        for _ in range(2):
            with pytest.raises(type(error)):
                model(x)
        model.layers[at].error = None
        for _ in range(2):
            assert_same_bits(model(x), expected)
        assert handle.stats().bytes_moved > 3 * handle.plan.moved_bytes
        handle.remove()
        assert_same_bits(model(x), expected)

    @pytest.mark.slow
    def test_interrupted_while_it_waits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Ctrl-C during a wait: the copy goes on, and must not land on top of the next one."""
        model, x, expected = expecting(Stack(5))
        handle = offload_over(model, all_layers(2), SlowLink(max_delay_s=0.01))
        real, calls = ThreadLink.wait, iter([None] * 3 + [KeyboardInterrupt] + [None] * 2 + [KeyboardInterrupt])

        def wait(link: ThreadLink, transfer: Any, measure: bool = False) -> float:
            if (error := next(calls, None)) is not None:
                raise error
            return real(link, transfer)

        monkeypatch.setattr(SlowLink, "wait", wait)
        interrupted = 0
        for _ in range(6):
            try:
                assert_same_bits(model(x), expected)
            except KeyboardInterrupt:
                interrupted += 1
        assert interrupted == 2
        handle.remove()

    @pytest.mark.slow
    @pytest.mark.parametrize("slots", [1, 2])
    def test_interrupted_at_any_moment(self, slots: int) -> None:
        """Signals between any two instructions, in our code too: nothing hangs, and the next forward is right."""

        class Interrupt(BaseException):
            pass

        armed: list[bool] = []

        def alarm(number: int, frame: object) -> None:
            if armed:
                armed.clear()
                raise Interrupt

        model, x, expected = expecting(Stack(5))
        handle = offload_over(model, all_layers(slots), SlowLink(max_delay_s=0.0005, seed=slots))
        before = signal.signal(signal.SIGALRM, alarm)
        interrupted = 0
        try:
            for seed in range(200):
                try:
                    armed.append(True)
                    signal.setitimer(signal.ITIMER_REAL, random.Random(seed).uniform(1e-5, 4e-3))
                    for _ in range(3):
                        model(x)
                    armed.clear()
                except Interrupt:
                    interrupted += 1
                assert_same_bits(model(x), expected)
        finally:
            armed.clear()
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert interrupted > 20
        handle.remove()
        assert_same_bits(model(x), expected)

    def test_another_thread_goes_on_after_an_error(self) -> None:
        model, x, expected = expecting(Stack(5, max_pause_s=0.001))
        model.layers[2] = Failing(model.layers[2])
        handle = offload_over(model, all_layers(1), SlowLink(max_delay_s=0.001))
        model.layers[2].error = ValueError("mine")
        failed: list[Exception] = []

        def fail() -> None:
            try:
                with torch.no_grad():
                    model(x)
            except ValueError as error:
                failed.append(error)

        thread = threading.Thread(target=fail)
        thread.start()
        thread.join(60)
        model.layers[2].error = None
        assert len(failed) == 1
        assert_same_bits(model(x), expected)
        handle.remove()


class TestGradients:
    """The weights that autograd saved are gone by the time of the backward: it must fail, not use others."""

    @pytest.mark.parametrize("slots", [1, 2, 5])
    def test_backward_is_refused(self, slots: int) -> None:
        model = Stack(5).eval()
        x = rows().requires_grad_()
        with torch.enable_grad():
            expected = model(x).detach()
            handle = headrace.offload(model, all_layers(slots))
            output = model(x)
            assert_same_bits(output, expected)
            assert_moved(handle, 1)
            message = r"a backward pass needs layers\.4\.\w+\.weight, whose bytes"
            with pytest.raises(StateError, match=message) as caught:
                output.sum().backward()
            for part in ("headrace is for inference", "torch.no_grad()", "remove() before training", "'resident')])"):
                assert part in str(caught.value)
            assert x.grad is None
        with torch.no_grad():
            assert_same_bits(model(x), expected)
        handle.remove()
        with torch.enable_grad():
            model(x).sum().backward()
        assert x.grad is not None

    @pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
    def test_backward_through_parts_that_are_offloaded_each(self, compiled: bool) -> None:
        """The unit of one part runs inside the forward of a model that has others, and residents around them."""
        model = Stack(5).eval()
        x = rows().requires_grad_()
        rules = headrace.Rules([("linear", "prefetch")])
        handles = [headrace.offload(model.layers[index], rules) for index in (1, 3)]
        forward = torch.compile(model, backend="eager") if compiled else model
        with torch.enable_grad():
            output = forward(x)
            for handle in handles:
                assert_moved(handle, 1)
            with pytest.raises(StateError, match=r"a backward pass needs [\w.]+weight, whose bytes have left"):
                output.sum().backward()
        assert x.grad is None
        for handle in handles:
            handle.remove()

    def test_gradients_of_inputs_through_residents_only(self) -> None:
        model = Stack(5).eval()
        x = torch.randn(4, DIM, requires_grad=True)
        with headrace.offload(model, all_layers()), torch.enable_grad():
            model.head(x).sum().backward()
        assert x.grad is not None

    @pytest.mark.parametrize("is_written", [False, True])
    def test_what_autograd_saves_beside_weights(self, is_written: bool) -> None:
        """The output of ``sigmoid``: it is freed with its history, and a write to it is noticed."""

        class Adapted(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return torch.sigmoid(super().forward(x).detach() + x @ self.adapter)

        x, gradients = rows(), []
        for is_offloaded in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(Adapted(DIM, DIM)).eval()
            model[0].adapter = nn.Parameter(torch.randn(DIM, DIM))
            if is_offloaded:
                handle = headrace.offload(model, headrace.Rules([("0.weight", "prefetch")]))
            with torch.enable_grad():
                model(x)
                dropped = weakref.ref(model(x))
                output = model(x)
                output.add_(1.0) if is_written else None
                if is_written:
                    with pytest.raises(StateError if is_offloaded else RuntimeError, match="version"):
                        output.sum().backward()
                else:
                    output.sum().backward()
                    gradients.append(model[0].adapter.grad)
            assert dropped() is None
        assert_moved(handle, 3)
        assert is_written or torch.equal(*gradients)
        handle.remove()

    def test_training_mode_warns(self) -> None:
        with pytest.warns(headrace.HeadraceWarning, match="training mode"):
            headrace.offload(Stack(3).train(), all_layers()).remove()
