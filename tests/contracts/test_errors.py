"""The promise: every wrong input is refused where it is given, by an error of the tree that names the thing, what was
expected, what was found and the fix; and the model is unchanged (contract 8)."""

from __future__ import annotations

import errno
import gc
import importlib
import inspect
import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import headrace
from checks import raising, require_forwards
from headrace import UVA, Budget, DiskOptions, OffloadConfig, Prefetch, errors
from headrace.checkpoint.safetensors_header import Checkpoint
from headrace.checkpoint.weight_map import WeightMap
from headrace.errors import BudgetError, HeadraceWarning, OptionError, OptionTypeError, SizeError, TransferError
from headrace.model.inventory import take_inventory
from headrace.runtime import forwards
from headrace.runtime.hooks import UnitHook
from headrace.sizes import parse_size
from headrace.stores.checkpoint_files import DiskStore
from headrace.stores.file_reads import File
from headrace.stores.plain_host import CpuStore
from headrace.stores.sources import ByteRange, Copy, Source
from headrace.testing import assert_moved, assert_same_bits
from headrace.transfer.link import ThreadLink
from models import DIM, MoE, Stack, all_layers, expecting, on_meta, rows, save, state_of

pytestmark = pytest.mark.usefixtures("no_grad")


class TestTree:
    def test_one_root_and_python_kinds(self) -> None:
        kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, Exception)]
        assert all(issubclass(kind, errors.HeadraceError | HeadraceWarning) for kind in kinds)
        for kind, builtin in (
            (OptionError, ValueError), (SizeError, OptionError), (errors.SelectionError, OptionError),
            (errors.RuleError, OptionError),
            (BudgetError, OptionError), (errors.LimitError, OptionError), (errors.PlanFileError, OptionError),
            (OptionTypeError, TypeError), (errors.CheckpointError, ValueError),
            (errors.StateError, RuntimeError),
            (errors.ModelChangedError, errors.StateError), (TransferError, errors.StateError),
            (errors.SlotConflictError, errors.StateError), (errors.RaceError, errors.StateError),
            (HeadraceWarning, UserWarning),
        ):  # fmt: skip
            assert issubclass(kind, builtin)

    def test_the_docstring_draws_all_of_it(self) -> None:
        for name, kind in inspect.getmembers(errors, inspect.isclass):
            assert name in (errors.__doc__ or ""), kind


class TestSizes:
    @pytest.mark.parametrize(("size", "num_bytes"), [
        ("20GiB", 20 * 2**30), ("20GB", 20 * 10**9), ("20 GB", 20 * 10**9), ("24 gb", 24 * 10**9),
        ("24G", 24 * 2**30), ("24g", 24 * 2**30), ("24Gi", 24 * 2**30), ("20gib", 20 * 2**30),
        ("1.5 GiB", 3 * 2**29), ("600MiB", 600 * 2**20), (" 512MB ", 512 * 10**6), ("512M", 2**29),
        ("0.5K", 512), ("1KiB", 1024), ("1kb", 1000), ("2TiB", 2**41), ("1TB", 10**12),
        ("4096B", 4096), ("7 b", 7), (4096, 4096), ("9007199254740993B", 9007199254740993),
        ("9" * 400 + "B", int("9" * 400)),
    ])  # fmt: skip
    def test_right(self, size: str | int, num_bytes: int) -> None:
        assert parse_size(size) == num_bytes

    @pytest.mark.parametrize("size", [
        "-1", "-1GiB", "lots", "", "1e3MiB", "GiB", "0x10B", "20iB", "1,5GiB", "2 0GiB", "20 Gbit", "٣GiB",
        "9" * 2000,
    ])  # fmt: skip
    def test_no_size(self, size: str) -> None:
        with pytest.raises(SizeError, match='; write it like "20GiB"') as caught:
            parse_size(size)
        assert repr(size) in str(caught.value)

    @pytest.mark.parametrize("size", ["20", " 1.5 "])
    def test_without_a_unit(self, size: str) -> None:
        with pytest.raises(SizeError, match=f'has no unit: write for example "{size.strip()}GiB"'):
            parse_size(size)

    @pytest.mark.parametrize("size", ["0", "0GiB", "0.0B", "0.1B", 0, -5])
    def test_not_positive(self, size: str | int) -> None:
        with pytest.raises(SizeError, match="expected more than 0 bytes"):
            parse_size(size)

    @pytest.mark.parametrize("size", [True, 1.5, None, b"1GiB", [1]])
    def test_no_text_and_no_number(self, size: Any) -> None:
        with pytest.raises(OptionTypeError, match="size: expected str or int, found"):
            parse_size(size)

    @pytest.mark.parametrize(("use", "name"), [
        (lambda size: headrace.offload(Stack(3), size), "device_memory"), (Budget, "device_memory"),
        (UVA, "max_bytes"), (lambda size: Budget("1GiB", host_memory=size), "host_memory"),
    ], ids=["offload", "Budget", "UVA", "host_memory"])  # fmt: skip
    def test_wherever_a_size_is_taken(self, use: Callable[[Any], Any], name: str) -> None:
        with pytest.raises(SizeError, match=f"^{name}: size 'lots' is not a size; write it like"):
            use("lots")
        with pytest.raises(SizeError, match=f"^{name}: size -4: expected more than 0 bytes; write it like"):
            use(-4)

    @pytest.mark.parametrize(
        ("use", "name"),
        [(Budget, "device_memory"), (UVA, "max_bytes"), (lambda s: Budget(1, host_memory=s), "host_memory")],
    )
    def test_wherever_no_size_is_given(self, use: Callable[[Any], Any], name: str) -> None:
        with pytest.raises(OptionTypeError, match=f"^{name}: expected str or int, found float 1.5; write it like"):
            use(1.5)


class TestOptions:
    @pytest.mark.parametrize("option", ["group_size", "num_in_group", "prefetch_step"])
    @pytest.mark.parametrize("value", [0, -1, True, 1.0, "2", None])
    def test_counts(self, option: str, value: Any) -> None:
        kind = OptionError if type(value) is int else OptionTypeError
        with pytest.raises(kind, match=rf"^{option}.*expected (at least 1|an int)"):
            Prefetch(**{option: value})

    @pytest.mark.parametrize("make", [
        lambda: Budget("lots"), lambda: Budget(1, host_memory=0), lambda: Budget(1, expert_slots=0),
        lambda: Budget(1, mode="tape"), lambda: Budget(1, rules=[("a", "gpu")]), lambda: UVA(1.5),
        lambda: Prefetch(0), lambda: Prefetch(2, 3), lambda: Prefetch(params="mlp"),
        lambda: headrace.Rules([]), lambda: headrace.Rules([("a", "cache")]),
        lambda: headrace.Rules([("a", "uva"), ("a", "cache")]), lambda: headrace.Workload([0]),
        lambda: headrace.Workload(4), lambda: headrace.Workload(context=-1), lambda: OffloadConfig("uva"),
    ])  # fmt: skip
    def test_what_python_refuses_names_no_flag(self, make: Callable[[], Any]) -> None:
        with pytest.raises((OptionError, OptionTypeError)) as caught:
            make()
        assert "--" not in str(caught.value)

    @pytest.mark.parametrize(("word", "message"), [
        ("budget", r"has no argument 'budget': write the policy as the second argument, e\.g\. \"20GiB\"$"),
        ("max_memory", "write the policy as the second argument"),
        ("device_map", r"'device_map': write device=\"cuda\" for where compute runs, and a policy such as"),
        ("torch_dtype", "'torch_dtype': write "),
    ])  # fmt: skip
    def test_words_of_other_libraries_name_what_to_write(self, word: str, message: str) -> None:
        from headrace.adapters.transformers import load as load_model

        policy = () if word == "budget" else ("1GiB",)
        for function, thing in ((headrace.offload, Stack(2)), (load_model, "nowhere")):
            with pytest.raises(OptionTypeError, match=message) as caught:
                function(thing, *policy, **{word: "x"})
            assert str(caught.value).startswith(f"{function.__name__}() has no argument")

    def test_what_to_plan_for(self) -> None:
        with pytest.raises(OptionTypeError, match=r"workload: expected a headrace\.config\.Workload, found NoneType"):
            Budget("1GiB", workload=None)  # type: ignore[arg-type]

    def test_more_in_a_group_than_it_has(self) -> None:
        with pytest.raises(OptionError, match=r"num_in_group = 3 is larger than group_size = 2.*lower num_in_group"):
            Prefetch(2, 3)

    @pytest.mark.parametrize(
        "policy", [Prefetch, UVA, lambda mode: Budget("1GiB", mode=mode)], ids=["Prefetch", "UVA", "Budget"]
    )
    def test_mode(self, policy: Callable[..., Any]) -> None:
        with pytest.raises(OptionError, match=r"mode 'tape': expected one of cpu, .*meta$"):
            policy(mode="tape")

    @pytest.mark.parametrize("params", ["mlp", 3, [3], ["mlp", None], [b"mlp"]])
    def test_names(self, params: Any) -> None:
        with pytest.raises(OptionTypeError, match="params: expected"):
            Prefetch(params=params)

    def test_one_string_instead_of_a_list_says_how_to_write_it(self) -> None:
        with pytest.raises(OptionTypeError, match=r"write \['mlp'\]"):
            UVA(params="mlp")

    @pytest.mark.parametrize("policy", [None, 1.5, True, {"prefetch": 1}, Prefetch])
    def test_policy(self, policy: Any) -> None:
        model = Stack(2)
        before = state_of(model)
        with pytest.raises(OptionTypeError, match="policy: expected a size such as"):
            headrace.offload(model, policy)
        assert state_of(model) == before

    @pytest.mark.parametrize("model", [None, "model", Stack, [Stack(2)]])
    def test_model(self, model: Any) -> None:
        with pytest.raises(OptionTypeError, match=r"model: expected a torch\.nn\.Module, found"):
            headrace.offload(model, "1GiB")

    @pytest.mark.parametrize(("device", "found"), [("cuda:99", "cuda:99"), ("meta", "meta"), ("xpu", "xpu")])
    def test_device(self, device: str, found: str) -> None:
        if device.startswith("cuda") and torch.cuda.is_available():
            pytest.skip("there is one")
        with pytest.raises(OptionError, match=f"device {found}: "):
            headrace.offload(Stack(2), all_layers(1), device=device)

    @pytest.mark.parametrize(("options", "kind", "message"), [
        ({"device": "tpu"}, OptionError, "device 'tpu': expected 'cpu', 'cuda', 'cuda:N' or a torch.device"),
        ({"device": ""}, OptionError, "device '': expected 'cpu', 'cuda', 'cuda:N' or a torch.device"),
        ({"device": 1.5}, OptionTypeError, "device: expected 'cpu', .*, found float 1.5"),
        ({"device": True}, OptionTypeError, "device: expected 'cpu', .*, found bool True"),
        ({"disk": True}, OptionTypeError, "disk: expected headrace.DiskOptions, .*, found bool True"),
    ], ids=str)  # fmt: skip
    @pytest.mark.parametrize("load", [False, True])
    def test_kinds(self, load: bool, options: dict[str, Any], kind: type[errors.HeadraceError], message: str) -> None:
        from headrace.adapters.transformers import load as load_model

        model = Stack(2)
        before = state_of(model)
        run = partial(headrace.offload, model, all_layers(1), checkpoint="nowhere")
        if load:
            run = partial(load_model, "nowhere", "1GiB")
        with pytest.raises(kind, match=f"^{message}$" if kind is OptionError else f"^{message}"):
            run(**options)  # refused before anything is opened: "nowhere" does not exist
        assert state_of(model) == before

    @pytest.mark.parametrize("group", [5, True, "world"])
    def test_group(self, group: Any) -> None:
        with pytest.raises(OptionTypeError, match=f"^group: expected a process group, .*, found .* {group!r}$"):
            headrace.offload(Stack(2), all_layers(1, "shm_cpu"), group=group)

    @pytest.mark.parametrize("checkpoint", [42, b"folder", True, []])
    def test_checkpoint(self, checkpoint: Any) -> None:
        with pytest.raises(OptionTypeError, match=r"^checkpoint: expected the path of a folder or file .*, found"):
            headrace.offload(Stack(2), all_layers(1, "disk"), checkpoint=checkpoint)

    def test_trace(self, tmp_path: Path) -> None:
        with headrace.offload(Stack(2).eval(), all_layers(1)) as handle:
            for path, found in ((tmp_path / "no" / "t.json", "No such file"), (tmp_path, "Is a directory")):
                with pytest.raises(OptionError, match=f"{path}': expected the name of a file .*found: {found}"):
                    handle.trace(path)
            with pytest.raises(OptionTypeError, match=r"^path of a trace: expected .*, found int 42$"):
                handle.trace(42)  # type: ignore[arg-type]

    def test_backends(self) -> None:
        with pytest.raises(OptionError, match=r"backend 'magic': expected one of auto, prefetch, uva, none"):
            OffloadConfig("magic")  # type: ignore[arg-type]
        with pytest.raises(OptionError, match=r"backend 'prefetch' needs prefetch=, which is not set"):
            OffloadConfig("prefetch")
        with pytest.raises(OptionError, match=r"prefetch and uva are both set.*leave one of them out"):
            OffloadConfig("auto", Prefetch(), UVA("1GiB"))

    @pytest.mark.parametrize("value", ["0", "-1", "many", "1.5", "", "²", "1025", "100000000000", "9" * 5000])
    def test_environment(self, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
        monkeypatch.setenv("HEADRACE_READERS", value)
        model = Stack(2).eval()
        before = state_of(model)
        with pytest.raises(OptionError, match=f"HEADRACE_READERS='{value[:40]}': expected a whole number of threads"):
            headrace.offload(model, all_layers(1))
        assert state_of(model) == before


class TestPlans:
    @pytest.mark.parametrize(("policy", "message"), [
        (Prefetch(params=["attention"]), "pattern 'attention' matches none of the 14 tensor names; the nearest are"),
        (Prefetch(group_size=50, params=["layers"]), "group rule 50/1 selects none of the 3 layers"),
        (UVA(1), "a limit of 1 bytes offloads nothing"),
        (UVA(params=["re:("]), "is not a regular expression"),
        (Prefetch(params=[""]), "an empty name pattern"),
    ], ids=str)  # fmt: skip
    def test_selections(self, policy: Prefetch | UVA, message: str) -> None:
        model = MoE(3) if "14" not in message else MoE(2)
        if isinstance(policy, UVA) and policy.max_bytes:
            model = Stack(2, dim=128)
        before = state_of(model)
        with pytest.raises(errors.SelectionError, match=message.replace("(", r"\(")):
            headrace.offload(model, policy)
        assert state_of(model) == before

    def test_a_budget_too_small_says_the_smallest(self) -> None:
        model = Stack(6, dim=128).eval()
        before = state_of(model)
        message = r"a budget of .* \(100 bytes\) is too small: .* use --device-memory 1MiB"
        with pytest.raises(BudgetError, match=message) as caught:
            headrace.offload(model, 100)
        assert state_of(model) == before
        minimum = caught.value.minimum_bytes
        assert f"({minimum} bytes)" in str(caught.value)
        with headrace.offload(model, minimum) as handle:
            assert handle.plan.device_bytes <= minimum
        with pytest.raises(BudgetError):
            headrace.offload(model, minimum - 1)

    def test_the_smallest_budget_is_that_of_the_rules(self) -> None:
        model = Stack(6, dim=128).eval()
        with pytest.raises(BudgetError, match="with everything offloaded headrace still needs") as alone:
            headrace.offload(model, 100)
        kept = Budget(100, rules=(("layers.0", "resident"),))
        with pytest.raises(BudgetError, match="with as much offloaded as the rules allow headrace") as ruled:
            headrace.offload(model, kept)
        assert ruled.value.minimum_bytes > alone.value.minimum_bytes

    def test_a_budget_for_small_weights_alone(self) -> None:
        with pytest.raises(BudgetError, match="with everything of 64 KiB or more offloaded headrace still needs"):
            headrace.offload(Stack(3, dim=8).eval(), 100)


class TestCheckpoints:
    def refuses(self, model: nn.Module, checkpoint: Any, message: str, policy: Any = None, **options: Any) -> None:
        before = state_of(model)
        with pytest.raises(errors.HeadraceError, match=message) as caught:
            headrace.offload(model, policy or all_layers(2, "disk"), checkpoint=checkpoint, **options)
        assert isinstance(caught.value, errors.CheckpointError | OptionError)
        assert state_of(model) == before

    def test_missing(self, tmp_path: Path) -> None:
        self.refuses(Stack(3).eval(), None, r"none were given: pass checkpoint=FOLDER .*save_pretrained")
        self.refuses(Stack(3).eval(), tmp_path / "nowhere", "No such file")
        model = on_meta(Stack, 3)
        self.refuses(model, None, "none were given", all_layers(2, "cpu"))

    def test_a_tensor_that_is_not_there(self, tmp_path: Path) -> None:
        model = Stack(3).eval()
        state = {n: t for n, t in model.state_dict().items() if n != "layers.1.linear.weight"}
        save_file(state, tmp_path / "model.safetensors")
        self.refuses(model, tmp_path, r"'layers\.1\.linear\.weight'.*nearest.* another model, or .*: pass checkpoint=")

    def test_of_another_model(self, tmp_path: Path) -> None:
        message = r"expected a tensor '.*'; found \d+ others, .* of another model, .* pass checkpoint= of this model\.$"
        self.refuses(MoE(2).eval(), save(Stack(3), tmp_path), message)

    def test_of_no_model(self, tmp_path: Path) -> None:
        save_file({}, tmp_path / "model.safetensors")
        self.refuses(Stack(3).eval(), tmp_path, r"found no tensors at all\. .* pass checkpoint= of this model\.$")

    def test_a_pipe(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "model.safetensors")
        message = r"model\.safetensors: expected a regular file; found a named pipe\. Write the weights to a file"
        self.refuses(Stack(3).eval(), tmp_path, message)

    def test_too_many_open_files(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        checkpoint = Checkpoint.open(save(Stack(3), tmp_path))
        monkeypatch.setattr(os, "open", raising(OSError(errno.EMFILE, "Too many open files")))
        mend = r"Too many open files\. Raise the limit of open files \(ulimit -n\), which is \d+"
        self.refuses(Stack(3).eval(), tmp_path, mend)
        for options in (DiskOptions(), DiskOptions(direct=True)):
            with pytest.raises(errors.CheckpointError, match=mend):
                File(checkpoint.files[0], options)

    def test_another_dtype(self, tmp_path: Path) -> None:
        model = Stack(3).eval()
        save(Stack(3).half(), tmp_path)
        self.refuses(
            model,
            tmp_path,
            r"expects torch\.float32, .* holds torch\.float16; load the model with dtype=torch\.float16",
        )

    def test_another_shape(self, tmp_path: Path) -> None:
        save(Stack(3, dim=16), tmp_path)
        self.refuses(
            Stack(3).eval(), tmp_path, r"layers\.0\.\w+\.weight: the model expects shape \[32.*, .* holds \[16"
        )

    def test_other_values(self, tmp_path: Path) -> None:
        model = Stack(3).eval()
        save(model, tmp_path)
        model.layers[2].linear.weight[3, 3] += 1
        self.refuses(
            model, tmp_path, r"layers\.2\.linear\.weight: the model's values differ from the checkpoint's; save"
        )

    def test_other_strides(self, tmp_path: Path) -> None:
        model = Stack(3).eval()
        save(model, tmp_path)
        weight = model.layers[1].linear.weight
        weight.data = weight.data.t().contiguous().t()
        self.refuses(
            model,
            tmp_path,
            r"layers\.1\.linear\.weight: the model's tensor has strides \[1, 32\], the file is row-major",
        )

    def test_a_file_that_changed_since_it_was_opened(self, tmp_path: Path) -> None:
        source = Stack(3)
        checkpoint = Checkpoint.open(save(source, tmp_path))
        state = load_file(tmp_path / "model.safetensors")
        save_file({"new": torch.zeros(99), **state}, tmp_path / "model.safetensors")
        model = on_meta(Stack, 3)
        self.refuses(model, checkpoint, "changed while in use: open it again")

    def test_mode_meta_on_a_real_model(self) -> None:
        self.refuses(
            Stack(3).eval(), None, r"mode 'meta' keeps no bytes, and layers\.0\.\S+ has some", all_layers(2, "meta")
        )

    def test_options_without_effect_warn(self, tmp_path: Path) -> None:
        model = Stack(3).eval()
        folder = save(model, tmp_path)
        with pytest.warns(HeadraceWarning, match=r"checkpoint=\.\.\. has no effect: mode 'cpu'"):
            headrace.offload(model, all_layers(2), checkpoint=folder).remove()
        with pytest.warns(HeadraceWarning, match=r"disk=\.\.\. has no effect"):
            headrace.offload(model, all_layers(2), disk=DiskOptions(direct=True)).remove()


class TestTransfers:
    @pytest.mark.parametrize("options", [DiskOptions(), DiskOptions(direct=True)], ids=["plain", "direct"])
    @pytest.mark.parametrize("slots", [1, 2, 5])
    def test_a_file_truncated_while_in_use(self, tmp_path: Path, options: DiskOptions, slots: int) -> None:
        """Every call that misses bytes fails, also when a file is back: which bytes are in it cannot be known."""
        model, x, expected = expecting(Stack(5))
        path = save(model, tmp_path) / "model.safetensors"
        handle = headrace.offload(model, all_layers(slots, "disk"), checkpoint=path, disk=options)
        for unit in range(slots):  # the copies made ahead must not be what fails
            handle._session.prefetcher.wait(unit)
            handle._session.prefetcher.release(unit)
        assert_same_bits(model(x), expected)
        whole, was = path.read_bytes(), path.stat()
        with path.open("r+b") as file:
            file.truncate(800)
        ended, written = r"expected \d+ bytes at \d+, the file ended after", r"expected the file.* it was written to"
        if slots == 5:  # nothing is read any more
            assert_same_bits(model(x), expected)
            return
        for _ in range(2):
            with pytest.raises(TransferError, match=rf"({ended}|{written}).*load the model again"):
                model(x)
        with pytest.raises(TransferError):
            handle.remove()
        path.write_bytes(whole)
        os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))
        for call in (lambda: model(x), handle.remove):
            with pytest.raises(TransferError, match=written):
                call()

    @pytest.mark.parametrize("keeps_time", [False, True])
    @pytest.mark.parametrize("options", [DiskOptions(), DiskOptions(direct=True)], ids=["plain", "direct"])
    def test_a_file_rewritten_while_in_use(self, tmp_path: Path, options: DiskOptions, keeps_time: bool) -> None:
        """As cp and rsync --inplace do it: other weights of the same size, in the open file, at times with its time."""
        torch.manual_seed(1)
        model, other, x = Stack(5).eval(), Stack(5).eval(), rows()
        path = save(model, tmp_path) / "model.safetensors"
        (tmp_path / "other").mkdir()
        content = (save(other, tmp_path / "other") / "model.safetensors").read_bytes()
        expected = model(x)
        handle = headrace.offload(model, all_layers(2, "disk"), checkpoint=path, disk=options)
        require_forwards(handle, x, expected, 1)
        handle.sync_prev_onload()
        was = path.stat()
        path.write_bytes(content)
        if keeps_time:
            os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))
        for call in (lambda: model(x), lambda: model(x), model.state_dict, handle.remove):
            with pytest.raises(TransferError, match="it was written to while in use"):
                call()

    @pytest.mark.parametrize("harm", ["rewrite", "truncate"])
    @pytest.mark.parametrize("during", [False, True])
    def test_a_mapped_file_that_is_written_to(self, harm: str, during: bool, tmp_path: Path) -> None:
        """Rows of a table are read where the file is mapped: no read could fail, and no later one be right."""
        model = nn.Sequential(nn.Embedding(5000, DIM), nn.Linear(DIM, DIM)).eval()
        ids = torch.tensor([3, 4])
        path = save(model, tmp_path) / "model.safetensors"
        expected, content = model(ids), path.read_bytes()
        handle = headrace.offload(model, UVA(params=["0.weight"], mode="disk"), checkpoint=path)
        assert_same_bits(model(ids), expected)

        def write(*_: object) -> None:
            if harm == "truncate":
                os.truncate(path, len(content) - 4096)
            else:
                path.write_bytes(content[:1000] + bytes(len(content) - 1000))

        if during:
            model[1].register_forward_hook(write)
        else:
            write()
        for call in (lambda: model(ids), lambda: model(ids), model.state_dict, handle.remove):
            with pytest.raises(TransferError, match="it was written to while in use"):
                call()

    def test_only_files_that_are_mapped_are_compared_at_every_forward(self, tmp_path: Path) -> None:
        """Of a hundred shards, one has the table; the others are compared when they are read."""
        model = nn.Sequential(nn.Embedding(5000, DIM), nn.Linear(DIM, DIM)).eval()
        weights = WeightMap.open(save(model, tmp_path, num_shards=2))
        named = {info.name: info for info in take_inventory(model).storages}
        sources = {name: weights.source(info) for name, info in named.items()}
        store = DiskStore(sources, stamps=weights.checkpoint.stamps)
        store.in_place("0.weight")
        (mapped,) = {part.tensor.path for part in sources["0.weight"].parts}
        (other,) = {path for path in weights.checkpoint.files if path != mapped}
        other.write_bytes(bytes(other.stat().st_size))
        store.require_mapped_unchanged()
        name = next(name for name, source in sources.items() if source.parts[0].tensor.path == other)
        with pytest.raises(TransferError, match="it was written to while in use"):
            store.read(name, torch.empty(named[name].num_bytes, dtype=torch.uint8))
        mapped.write_bytes(bytes(mapped.stat().st_size))
        with pytest.raises(TransferError, match="it was written to while in use"):
            store.require_mapped_unchanged()
        store.close()

    def test_an_error_of_the_disk(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        model, x, expected = expecting(Stack(5))
        handle = headrace.offload(model, all_layers(2, "disk"), checkpoint=save(model, tmp_path))
        assert_same_bits(model(x), expected)

        with monkeypatch.context() as patch:
            patch.setattr("os.preadv", raising(OSError(5, "Input/output error")))
            message = r"model\.safetensors: reading \d+ bytes at \d+ failed: Input/output error"
            with pytest.raises(TransferError, match=message):
                model(x)
        assert_same_bits(model(x), expected)
        handle.remove()

    def test_a_reader_that_fails_in_an_unforeseen_way(self) -> None:
        model = Stack(4).eval()
        handle = headrace.offload(model, all_layers(1))
        model(rows())

        class Broken(Source):
            def read(self, offset: int, into: memoryview) -> None:
                raise ZeroDivisionError("source")

        loads = handle._session.prefetcher._loads
        loads[2] = type(loads[2])(2, (Copy(ByteRange(Broken(), 0, 8), 0),))
        with pytest.raises(TransferError, match=r"unit 2 was not copied: ZeroDivisionError\('source'\)"):
            model(rows())
        handle.remove()

    def test_a_slot_held_for_ever(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(forwards, "CONFLICT_TIMEOUT_S", 0.05)
        model = Stack(3).eval()
        handle = headrace.offload(model, all_layers(1))
        has_it, ends = threading.Event(), threading.Event()

        def hold() -> None:
            handle._session.prefetcher.wait(0)
            has_it.set()
            ends.wait()

        thread = threading.Thread(target=hold)
        thread.start()
        has_it.wait()
        message = r"^layers\.1 \(unit 1\) needs the slot of layers\.0 \(unit 0\), which another .* one .* per thread"
        with pytest.raises(errors.SlotConflictError, match=message):
            model.layers[1](rows())
        ends.set()
        thread.join()
        handle.remove()


@pytest.mark.parametrize("policy", [all_layers(1), UVA(params=["layers"])], ids=["prefetch", "uva"])
@pytest.mark.parametrize("name", ["headrace", "headrace.model.live_tensors"])
def test_a_reload_while_offloaded(name: str, policy: Any) -> None:
    """The package is the first of all of its modules; the other one holds what the dispatcher calls."""
    gc.collect()  # of what tests before this one have left offloaded
    model = Stack(3).eval()
    expected = model(rows())
    with headrace.offload(model, policy) as handle:
        message = r"^headrace was reloaded .* while layers\.\S+ of a Stack is offloaded.* call handle\.remove\(\) first"
        with pytest.raises(errors.StateError, match=message):
            importlib.reload(sys.modules[name])
        assert_same_bits(
            [model(rows()), model.layers[0].linear.weight.clone()],
            [expected, model.state_dict()["layers.0.linear.weight"]],
        )
        assert handle.plan.uva or handle.stats().bytes_moved > 0
    gc.collect()
    assert importlib.reload(headrace) is headrace


class TestInterrupted:
    """Whatever goes wrong in the middle of an offload, the model is as it was, threads and files included."""

    @pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, RuntimeError("mine")])
    @pytest.mark.parametrize("place", ["progress", "hooks", "slots", "state guard", "first copy", "store"])
    def test_everything_is_undone(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, error: Any
    ) -> None:
        fail = raising(error)
        calls = iter(range(100))

        def fail_third(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == 2:
                raise error
            return real(*args, **kwargs)

        folder = save(MoE(3), tmp_path)
        progress: Any = None
        model = on_meta(MoE, 3)
        if place == "progress":
            progress = fail
        elif place == "hooks":
            real = UnitHook.attach
            monkeypatch.setattr(UnitHook, "attach", fail_third)
        elif place == "slots":
            monkeypatch.setattr(ThreadLink, "allocate", fail)
        elif place == "state guard":
            monkeypatch.setattr("headrace.runtime.session.StateGuard", fail)
        elif place == "first copy":
            monkeypatch.setattr(ThreadLink, "copy", fail)
        else:
            monkeypatch.setattr(CpuStore, "__init__", fail)
        before = state_of(model)
        with pytest.raises(BaseException) as caught:  # noqa: PT011
            headrace.offload(model, all_layers(2), checkpoint=folder, progress=progress)
        assert caught.type is (error if isinstance(error, type) else type(error))
        assert state_of(model) == before
        monkeypatch.undo()
        handle = headrace.offload(model, all_layers(2), checkpoint=folder)
        model(torch.arange(3))
        assert_moved(handle, 1)
        handle.remove()

    def test_remove_that_cannot_read_leaves_the_offload_in_force(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model, x, expected = expecting(Stack(4))
        path = save(model, tmp_path) / "model.safetensors"
        handle = headrace.offload(model, all_layers(2, "disk"), checkpoint=path)
        model(x)

        monkeypatch.setattr(os, "preadv", raising(OSError(errno.EIO, os.strerror(errno.EIO))))
        with pytest.raises(TransferError, match="Input/output error"):
            handle.remove()
        monkeypatch.undo()
        assert_same_bits(model(x), expected)
        handle.remove()
        assert_same_bits(model(x), expected)
        assert model.layers[0].linear.weight.shape == (DIM, DIM)
