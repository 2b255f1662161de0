"""One step of a large model, offloaded by headrace and by other libraries within the same device memory.

    python benchmarks/other_offloaders.py --shapes wan,flux,qwen3 --cases headrace,flextensor,leaf --out FILE

Shapes are those of published checkpoints, with seeded bf16 weights: ``wan`` is one expert of Wan2.2-T2V-A14B, and a
step has the tokens of 81 frames of 480 x 832; ``flux`` is FLUX.1-dev with those of an image of 1024 x 1024; ``qwen3``
is the reference step's stack of Qwen3-8B's layers with 8,192 rows, eager. The cases:

* ``resident``: always run;
* ``flextensor``: NVIDIA's FlexTensor, which counts weights and blocks in its share of the device's memory; its first
  steps discover and profile;
* ``headrace``: ``headrace.offload`` with a budget of what FlexTensor holds between two steps, or of ``--memory``;
* ``coded``: the same with codec ``exp3``;
* ``fp8``, ``q4``: ``headrace`` with weights stored in fp8 (diffusers' layerwise casting), or in GGUF's Q4_0, beside
  ``resident-fp8`` and ``resident-q4``, which are run with them and have their bits;
* ``leaf``, ``block``: diffusers' group offloading by leaf or by block, with a stream and ``record_stream``.

Each case is a process with a copy of the weights; they start one after another and then take turns. What a case cannot
do is printed and left out of the results. On a CPU (``--device cpu``) the shapes are tiny, and the cases of diffusers
run without streams: that tries the script.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import multiprocessing
import random
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import headrace
from harness import Timing, append, finish, link_bytes_per_s, parser_of, print_step, time_cuda, time_host, words_of
from headrace.cli.bench_step import QWEN3_8B, DecoderShape, build_stack, fill
from headrace.config import Budget, Codec, Workload
from headrace.model.inventory import take_inventory
from headrace.sizes import parse_size

CASES = ("flextensor", "headrace", "coded", "fp8", "q4", "leaf", "block")
RESIDENT = ("resident", "resident-fp8", "resident-q4")
# Device memory for weights; a third of them where there is no entry.
MEMORY = {"flux": "6GiB", "qwen3": "5000MB"}
LIMIT_S = 240  # of one answer of a process
_LONG_MS = 500.0


# -- shapes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """A model and a step of it: a class of diffusers with its configuration, or the reference stack (no class)."""

    model: str | None
    config: dict[str, Any]
    inputs: dict[str, Sequence[int]]
    rows: int
    units: tuple[str, ...]  # the modules that FlexTensor moves


def _wan(tiny: bool) -> Shape:
    config = {
        "patch_size": (1, 2, 2), "num_attention_heads": 40, "attention_head_dim": 128, "in_channels": 16,
        "out_channels": 16, "text_dim": 4096, "freq_dim": 256, "ffn_dim": 13824, "num_layers": 40,
        "cross_attn_norm": True, "qk_norm": "rms_norm_across_heads", "eps": 1e-6, "rope_max_seq_len": 1024,
    }  # fmt: skip
    # 81 frames are (81 - 1) / 4 + 1 latents, and each side is an eighth.
    latents = (21, 60, 104)
    if tiny:
        config |= {"num_attention_heads": 2, "text_dim": 128, "ffn_dim": 512, "num_layers": 6}
        latents = (2, 8, 8)
    text = (1, 512, config["text_dim"])
    inputs = {"hidden_states": (1, 16, *latents), "timestep": (1,), "encoder_hidden_states": text}
    tokens = latents[0] * latents[1] * latents[2] // 4
    return Shape("WanTransformer3DModel", config, inputs, tokens, ("blocks.*",))


def _flux(tiny: bool) -> Shape:
    config = {
        "patch_size": 1, "in_channels": 64, "num_layers": 19, "num_single_layers": 38, "attention_head_dim": 128,
        "num_attention_heads": 24, "joint_attention_dim": 4096, "pooled_projection_dim": 768, "guidance_embeds": True,
        "axes_dims_rope": (16, 56, 56),
    }  # fmt: skip
    tokens, words = 4096, 512
    if tiny:
        config |= {"num_layers": 3, "num_single_layers": 6, "num_attention_heads": 2, "joint_attention_dim": 128}
        tokens, words = 64, 16
    inputs = {
        "hidden_states": (1, tokens, 64), "encoder_hidden_states": (1, words, config["joint_attention_dim"]),
        "pooled_projections": (1, 768), "timestep": (1,), "guidance": (1,), "img_ids": (tokens, 3),
        "txt_ids": (words, 3),
    }  # fmt: skip
    units = ("transformer_blocks.*", "single_transformer_blocks.*")
    return Shape("FluxTransformer2DModel", config, inputs, tokens + words, units)


def _qwen3(tiny: bool) -> Shape:
    rows, config = 8192, asdict(QWEN3_8B)
    if tiny:
        rows, config = 16, config | {"num_layers": 6, "hidden": 256, "intermediate": 768, "query": 256, "key_value": 64}
    return Shape(None, config, {"x": (rows, config["hidden"])}, rows, ("layers.*",))


SHAPES = {"wan": _wan, "flux": _flux, "qwen3": _qwen3}


def build(shape: Shape, device: torch.device, rest: torch.device) -> nn.Module:
    """The model with seeded weights, the same every time, drawn on ``device`` and kept on ``rest``."""
    if shape.model is None:
        return build_stack(DecoderShape(**shape.config), torch.bfloat16, rest, device)
    import diffusers
    from accelerate import init_empty_weights

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with init_empty_weights(include_buffers=False):
            model: nn.Module = getattr(diffusers, shape.model)(**shape.config)
    finally:
        torch.set_default_dtype(before)
    return fill(model, rest, device).to(rest)


def store(model: Any, form: str, device: torch.device) -> None:
    """Store the weights in another form: ``fp8``, or ``q4`` of GGUF, with codes drawn on ``device``."""
    if form == "fp8":
        model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)
    if form != "q4":
        return
    import gguf
    from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter

    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType.Q4_0]
    for parent in list(model.modules()):
        for name, linear in list(parent.named_children()):
            if type(linear) is not nn.Linear or linear.in_features % block:
                continue
            weight = linear.weight
            blocks = len(weight), linear.in_features // block, size
            packed = torch.empty(blocks, dtype=torch.uint8, device=device).random_(256)
            packed[..., :2] = torch.tensor([5e-3], dtype=torch.float16, device=device).view(torch.uint8)
            with torch.device("meta"):
                sizes = linear.in_features, linear.out_features, linear.bias is not None
                new = GGUFLinear(*sizes, compute_dtype=torch.bfloat16)
            new.weight = GGUFParameter(packed.flatten(1).to(weight.device), quant_type=gguf.GGMLQuantizationType.Q4_0)
            new.bias = linear.bias
            setattr(parent, name, new.requires_grad_(False))


def inputs_of(shape: Shape, device: torch.device) -> dict[str, torch.Tensor]:
    """Seeded inputs of a step."""
    generator = torch.Generator().manual_seed(1)
    made = {
        name: torch.randn(*sizes, generator=generator).to(device, torch.bfloat16)
        for name, sizes in shape.inputs.items()
    }
    for name in ("timestep", "guidance"):
        if name in made:
            made[name] = made[name].abs()
    return made


# -- one case, in a process of its own -----------------------------------------------------------------------------


class _Case:
    """One copy of the model under one way of offloading it; the methods without ``_`` answer the parent."""

    def __init__(self, name: str, shape: Shape, device: torch.device) -> None:
        self._name, self._shape, self._device = name, shape, device
        # diffusers pins a copy of every weight: with theirs in host memory too, a large model has no room there.
        rest = torch.device("cpu") if name in ("headrace", "coded", "flextensor", "fp8", "q4") else device
        self._model: Any = build(shape, device, rest)
        torch.manual_seed(0)
        store(self._model, name.removeprefix("resident-"), device)
        self._inputs = inputs_of(shape, device)
        self._num_bytes = take_inventory(self._model).num_bytes
        self._moved: int | None = self._num_bytes
        self._planned = 0
        self._digests: list[str] = []
        self._output: Any = None  # of the last step
        if name == "flextensor":
            import flextensor  # noqa: F401 (its import is no part of its start)
        self._base_bytes = 0
        if device.type == "cuda":
            small = torch.ones(64, 64, dtype=torch.bfloat16, device=device)
            small @ small  # its library keeps 34 MB from the first product on, which is nobody's weights
            del small
            gc.collect()
            torch.cuda.empty_cache()
            self._base_bytes = torch.cuda.memory_allocated(device) - (self._num_bytes if rest == device else 0)

    def weights(self) -> int:
        """Bytes of the model."""
        return self._num_bytes

    def start(self, memory: int, machine: str | None) -> dict[str, Any]:
        """Offload within ``memory`` bytes of device memory, and run until a step has its final speed."""
        begin = time.perf_counter()
        self._machine = machine
        self._reset_peak()
        preparing = getattr(self, f"_{self._name.partition('-')[0]}")(memory)
        offload_s = time.perf_counter() - begin
        for _ in range(preparing):
            self._digests.append(_digest(self._step()))
        prepared_s = time.perf_counter() - begin
        output = self._step()
        self._wait()
        ready_s = time.perf_counter() - begin
        self._digests.append(_digest(output))
        del output
        if self._name == "flextensor":
            self._moved = self._copied_bytes()
        self._output = None
        gc.collect()
        peak, held = self._peak(), self._held()
        self._reset_peak()
        times = {"offload_s": offload_s, "prepared_s": prepared_s, "ready_s": ready_s}
        return {**times, "start_peak_device_bytes": peak, "held_device_bytes": held}

    def measure(self, repeats: int) -> list[float]:
        """Times of ``repeats`` steps in ms, or of one that is long enough to be its own warm-up."""
        begin = time.perf_counter()
        self._output = self._step()
        self._wait()
        first_ms = (time.perf_counter() - begin) * 1e3
        if first_ms > _LONG_MS:
            return [first_ms]
        return (time_cuda if self._device.type == "cuda" else time_host)(self._kept_step, repeats)

    def link(self, repeats: int) -> float:
        """Bytes per second of a large copy to the device."""
        return link_bytes_per_s(self._device, repeats)

    def end(self) -> dict[str, Any]:
        """What the steps needed, and what the last one gave."""
        peak = self._peak()
        digests = {*self._digests, _digest(self._output)}
        return {
            "peak_device_bytes": peak,
            "planned_device_bytes": self._planned,
            "bytes_moved": self._moved,
            "digest": digests.pop() if len(digests) == 1 else "its own steps differ",
            "finite": bool(self._output.isfinite().all()),
        }

    # -- ways to offload; each returns how many steps prepare it

    def _resident(self, memory: int) -> int:
        self._moved = 0
        return 0

    def _headrace(self, memory: int, codec: Codec = "none") -> int:
        budget = Budget(memory, workload=Workload((self._shape.rows,)), codec=codec)
        policy = headrace.make_plan(self._model, budget, machine=self._machine) if self._machine else budget
        plan = headrace.offload(self._model, policy, device=self._device).plan
        self._planned, self._moved = plan.device_bytes, plan.moved_bytes
        return 0

    def _coded(self, memory: int) -> int:
        return self._headrace(memory, "exp3")

    _fp8 = _q4 = _headrace

    def _flextensor(self, memory: int) -> int:
        import flextensor

        config = flextensor.OffloadConfig(
            include_patterns=list(self._shape.units),
            max_gpu_mem_fraction=memory / torch.cuda.mem_get_info(self._device)[1],
            min_blocks=2,
            pinned_memory_mode="host_register",
        )
        self._model = flextensor.offload(self._model, config=config)
        return int(flextensor.get_offload_manager().iters_before_inference)

    def _leaf(self, memory: int) -> int:
        return self._group(offload_type="leaf_level")

    def _block(self, memory: int) -> int:
        return self._group(offload_type="block_level", num_blocks_per_group=1)

    def _group(self, **kind: Any) -> int:
        from diffusers.hooks import apply_group_offloading

        streams = {"use_stream": True, "record_stream": True} if self._device.type == "cuda" else {}
        host = torch.device("cpu")
        apply_group_offloading(self._model, onload_device=self._device, offload_device=host, **kind, **streams)
        return 1  # it learns the order of the modules

    # -- helpers

    @torch.no_grad()
    def _step(self) -> torch.Tensor:
        if self._shape.model is None:
            return self._model(**self._inputs)  # type: ignore[no-any-return]
        return self._model(**self._inputs, return_dict=False)[0]  # type: ignore[no-any-return]

    def _kept_step(self) -> None:
        self._output = self._step()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _reset_peak(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def _peak(self) -> int:
        on_gpu = self._device.type == "cuda"
        return torch.cuda.max_memory_allocated(self._device) - self._base_bytes if on_gpu else self._planned

    def _held(self) -> int:
        on_gpu = self._device.type == "cuda"
        return torch.cuda.memory_allocated(self._device) - self._base_bytes if on_gpu else self._planned

    def _copied_bytes(self) -> int | None:
        """Bytes that a step copies to the device, by torch's profiler; ``None``: it does not say."""
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            self._kept_step()
            self._wait()
        with tempfile.TemporaryDirectory() as folder:
            trace.export_chrome_trace(f"{folder}/trace.json")
            events = json.loads(Path(f"{folder}/trace.json").read_text())["traceEvents"]
        copies = [event["args"]["bytes"] for event in events if event.get("name", "").startswith("Memcpy HtoD")]
        return sum(copies) or None


def _digest(output: torch.Tensor) -> str:
    return hashlib.sha256(output.cpu().contiguous().view(torch.uint8).numpy()).hexdigest()


def serve(pipe: Connection, name: str, shape: str, device: str) -> None:
    """Answer the parent's calls of the methods of a case until it closes the pipe; the first one builds it."""
    try:
        found = SHAPES[shape](device == "cpu")
        if found.model is not None:
            import diffusers  # noqa: F401 (while another shape has its turn)
        pipe.recv()
        case = _Case(name, found, torch.device(device))
        pipe.send(("done", case.weights()))
        while True:
            method, arguments = pipe.recv()
            pipe.send(("done", getattr(case, method)(*arguments)))
    except EOFError:
        pass
    except BaseException as error:
        traceback.print_exc()
        with suppress(OSError):
            pipe.send(("failed", f"{type(error).__name__}: {error}"[:500]))


# -- all cases of a shape ------------------------------------------------------------------------------------------


class _Process:
    """The process of one case; ``why`` says what ended it."""

    def __init__(self, name: str, shape: str, device: str) -> None:
        self.name, self.why = name, ""
        self.found: dict[str, Any] = {}
        self.samples_ms: list[float] = []
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, name, shape, device), daemon=True)
        self._process.start()
        theirs.close()

    def answer(self) -> Any:
        """What the process sends next; ``None`` if it failed, ended or takes too long."""
        try:
            what, value = self._pipe.recv() if self._pipe.poll(LIMIT_S) else ("failed", f"no answer in {LIMIT_S} s")
        except EOFError:
            what, value = "failed", f"ended with code {self._process.exitcode}"
        if what == "failed":
            self.why = value
            print(f"{self.name}: {value}", flush=True)
            self.close()
        return None if what == "failed" else value

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the case."""
        self.send(method, *arguments)
        return None if self.why else self.answer()

    def send(self, method: str, *arguments: Any) -> None:
        """Have it begin, if it still runs."""
        if not self.why:
            self._pipe.send((method, arguments))

    def close(self) -> None:
        """End it, without waiting for its memory."""
        self._pipe.close()
        self._process.kill()


def run(
    shape: str, processes: dict[str, _Process], memory: str | None, device: str, given: Any
) -> list[dict[str, Any]]:
    """One result per case that ran."""
    begin = time.perf_counter()
    for process in processes.values():
        process.send("build")
    weight_bytes = max(process.answer() or 0 for process in processes.values())
    resident = processes["resident"]
    print(f"{shape}: built after {time.perf_counter() - begin:.0f} s", flush=True)
    size = parse_size(memory) if memory else weight_bytes // 3
    # FlexTensor before headrace, which gets what FlexTensor took of its share.
    for name in sorted(processes, key=(*RESIDENT, *CASES).index):
        processes[name].found |= processes[name].ask("start", size, given.machine) or {}
        print(f"{shape} {name}: {processes[name].found}, {time.perf_counter() - begin:.0f} s", flush=True)
        if name == "flextensor" and processes[name].found:
            size = min(size, processes[name].found["held_device_bytes"])
    alive = [process for process in processes.values() if not process.why]
    shuffle = random.Random(0)
    for _ in range(given.rounds):
        for process in shuffle.sample(alive, len(alive)):
            process.samples_ms += process.ask("measure", given.repeats) or []
        if time.perf_counter() - begin > given.seconds:
            break
    link = resident.ask("link", 5)
    for process in alive:
        process.found |= process.ask("end") or {}
    print(f"{shape}: timed after {time.perf_counter() - begin:.0f} s", flush=True)
    if resident.why:
        raise SystemExit(f"{shape}: nothing to compare with: {resident.why}")
    rows = SHAPES[shape](device == "cpu").rows
    alike = {name: processes.get(f"resident-{name.removeprefix('resident-')}", resident) for name in processes}
    done = [process for process in alive if not process.why]
    return [_row(shape, rows, process, alike[process.name], weight_bytes, link) for process in done]


def _row(
    shape: str, rows: int, process: _Process, resident: _Process, weight_bytes: int, link: float
) -> dict[str, Any]:
    timing, resident_ms = Timing(tuple(process.samples_ms)), Timing(tuple(resident.samples_ms)).ms
    found = dict(process.found)
    same = found.pop("digest") == resident.found["digest"] and found.pop("finite")
    return {
        "table": f"offloaders-{shape}",
        "case": process.name,
        "rows": rows,
        "ms": timing.ms,
        "spread_ms": timing.spread_ms,
        "samples_ms": process.samples_ms,
        "floor_ms": max(resident_ms, (found["bytes_moved"] or 0) / link * 1e3),
        "resident_ms": resident_ms,
        "weight_bytes": weight_bytes,
        "link_gb_per_s": link / 1e9,
        **found,
        "bit_equal": same,
    }


def _by_shape(text: str) -> dict[str, str]:
    """Sizes by shape."""
    parts = dict(part.partition("=")[::2] for part in text.split(","))
    if parts.keys() - SHAPES.keys() or not all(parts.values()):
        raise argparse.ArgumentTypeError(f"expected sizes such as wan=2600MB,flux=6GiB, found {text!r}")
    return parts


def main() -> None:
    """Run from the command line."""
    parser = parser_of(__doc__, rounds=3, repeats=1)
    parser.add_argument("--shapes", type=words_of(tuple(SHAPES)), default=["wan", "flux"], help="default wan,flux")
    parser.add_argument("--cases", type=words_of(CASES), default=["headrace", "leaf"], help="of " + ", ".join(CASES))
    parser.add_argument(
        "--memory", type=_by_shape, default={}, help="on the device for weights, such as wan=2600MB,flux=6GiB"
    )
    parser.add_argument("--machine", help="headrace plans with the rates of h200, say; default as it finds them")
    parser.add_argument("--seconds", type=float, default=600.0, help="no new round of a shape after so many")
    parser.add_argument("--device", default="cuda", help="cpu: tiny shapes")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    names = [*(each for each in RESIDENT if each.partition("-")[2] in ("", *given.cases)), *given.cases]
    processes = {shape: {name: _Process(name, shape, given.device) for name in names} for shape in given.shapes}
    for shape in given.shapes:
        memory = given.memory.get(shape) or (MEMORY.get(shape) if given.device != "cpu" else None)
        for row in run(shape, processes[shape], memory, given.device, given):
            rows.append(row)
            print_step(row)
            append(row, given.out)
        for process in processes[shape].values():
            process.close()
    done = {(row["table"].removeprefix("offloaders-"), row["case"]) for row in rows}
    not_run = [f"{shape} {case}" for shape in given.shapes for case in given.cases if (shape, case) not in done]
    finish("other_offloaders", rows, not_run=not_run)


if __name__ == "__main__":
    main()
