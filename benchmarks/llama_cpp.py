"""Tokens per second of llama.cpp with experts on the CPU: Qwen3-30B-A3B in bf16, gpt-oss-120b in MXFP4, random weights.

    python benchmarks/llama_cpp.py --library FOLDER --folder /dev/shm --out FILE
    python benchmarks/llama_cpp.py --library FOLDER --device cpu --tiny     tries the script

``--library``: the folder of a build's libllama, libggml and their backends, such as ``bins/linux-x64-cuda`` of the npm
package ``@node-llama-cpp/linux-x64-cuda`` 3.14.5 (llama.cpp b7347, whose structures are below; later ones want a driver
of CUDA 13.1). ``--folder`` gets a GGUF file of the published shape (``--layers`` of it) by the package ``gguf``. As
``--n-cpu-moe`` of its commands does, experts of the first layers are on the CPU, of so many that the rest fits
``--card`` less ``--reserve`` bytes; all else is on the GPU. ``--threads``: default the better of all cores less two and
half of them. A token is the mean of ``--tokens`` after a prompt of 128; prompts of ``--prompts`` tokens run once each
after one that is not timed. The rest of the device is held, as in ``card_24gb.py``. Weights are random, so that routers
choose as they please: rates of the CPU do not depend on it.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter

from card_24gb import Card, add_card_arguments
from harness import counts, finish, kept, parser_of, words_of, writable_folder
from headrace.experts.cpu.pool import physical_cores
from headrace.sizes import parse_size
from published_configs import GPT_OSS_120B, QWEN3_30B_A3B

MODELS = {"qwen3-30b-a3b": QWEN3_30B_A3B, "gpt-oss-120b": GPT_OSS_120B}
_TINY = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512}
_TINY_EXPERTS = {"num_hidden_layers": 4, "num_local_experts": 8, "num_experts": 8}
_TINY_EXPERTS |= {"intermediate_size": 256, "moe_intermediate_size": 256}
PROMPT_TOKENS, CONTEXT = 128, 8448
_PIECE = 64 << 20
_AT, _I32, _U32, _F32, _BOOL = ctypes.c_void_p, ctypes.c_int32, ctypes.c_uint32, ctypes.c_float, ctypes.c_bool


class ModelParams(ctypes.Structure):
    """``llama_model_params`` of b7347; ``rest`` is room for that of another."""

    _fields_ = (
        ("devices", _AT), ("tensor_buft_overrides", _AT), ("n_gpu_layers", _I32), ("split_mode", _I32),
        ("main_gpu", _I32), ("tensor_split", _AT), ("progress_callback", _AT), ("user_data", _AT),
        ("kv_overrides", _AT), ("vocab_only", _BOOL), ("use_mmap", _BOOL), ("bools", _BOOL * 6),
        ("rest", ctypes.c_char * 176),
    )  # fmt: skip


class ContextParams(ctypes.Structure):
    """``llama_context_params`` of b7347, as far as it is set here."""

    _fields_ = (
        ("n_ctx", _U32), ("n_batch", _U32), ("n_ubatch", _U32), ("n_seq_max", _U32), ("n_threads", _I32),
        ("n_threads_batch", _I32), ("rest", ctypes.c_char * 232),
    )  # fmt: skip


class Batch(ctypes.Structure):
    """``llama_batch``."""

    _fields_ = (("n_tokens", _I32), ("token", _AT), *((name, _AT) for name in ("embd", "pos", "num", "seq", "logits")))


class Override(ctypes.Structure):
    """``llama_model_tensor_buft_override``."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buft", _AT))


def open_library(folder: Path) -> ctypes.CDLL:
    """libllama, with the backends of the folder loaded."""
    (llama,), (ggml,) = (folder.glob(f"{name}.*so") for name in ("libllama", "libggml"))
    ctypes.CDLL(str(folder / "libggml-base.so"), ctypes.RTLD_GLOBAL)
    backends = ctypes.CDLL(str(ggml), ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(llama), ctypes.RTLD_GLOBAL)
    backends.ggml_backend_load_all_from_path(str(folder).encode())
    library.cpu_buffer_type = ctypes.CDLL(str(folder / "libggml-base.so")).ggml_backend_cpu_buffer_type
    library.cpu_buffer_type.restype = _AT
    for name, found in (("model", ModelParams), ("context", ContextParams)):
        getattr(library, f"llama_{name}_default_params").restype = found
    library.llama_model_load_from_file.argtypes = ctypes.c_char_p, ModelParams
    library.llama_init_from_model.argtypes = _AT, ContextParams
    library.llama_batch_get_one.argtypes, library.llama_batch_get_one.restype = (_AT, _I32), Batch
    library.llama_decode.argtypes = _AT, Batch
    library.llama_memory_clear.argtypes = _AT, _BOOL
    library.llama_set_n_threads.argtypes = _AT, _I32, _I32
    for name in ("llama_model_load_from_file", "llama_init_from_model", "llama_get_memory", "llama_get_logits_ith"):
        getattr(library, name).restype = _AT
    for name in ("llama_get_memory", "llama_synchronize", "llama_free", "llama_model_free"):
        getattr(library, name).argtypes = (_AT,)
    library.llama_get_logits_ith.argtypes = _AT, _I32
    library.llama_backend_init()
    return library


# -- files -------------------------------------------------------------------------------------------------------------


def tensors_of(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Names, shapes and types of a file's tensors."""
    hidden, head, heads = config["hidden_size"], config["head_dim"], config["num_attention_heads"]
    groups, is_oss, vocabulary = config["num_key_value_heads"], "num_local_experts" in config, config["vocab_size"]
    experts = config["num_local_experts"] if is_oss else config["num_experts"]
    inner = config["intermediate_size"] if is_oss else config["moe_intermediate_size"]
    yield "token_embd.weight", (vocabulary, hidden), "bf16"
    for layer in range(config["num_hidden_layers"]):
        block = f"blk.{layer}."
        shapes = {"attn_q": (heads * head, hidden), "attn_output": (hidden, heads * head)}
        shapes |= dict.fromkeys(("attn_k", "attn_v"), (groups * head, hidden))
        for name, shape in shapes.items():
            yield f"{block}{name}.weight", shape, "bf16"
            if is_oss:
                yield f"{block}{name}.bias", shape[:1], "f32"
        yield f"{block}attn_norm.weight", (hidden,), "f32"
        yield f"{block}{'post_attention_norm' if is_oss else 'ffn_norm'}.weight", (hidden,), "f32"
        if is_oss:
            yield f"{block}attn_sinks.weight", (heads,), "f32"
        else:
            yield f"{block}attn_q_norm.weight", (head,), "f32"
            yield f"{block}attn_k_norm.weight", (head,), "f32"
        yield f"{block}ffn_gate_inp.weight", (experts, hidden), "f32"
        if is_oss:
            yield f"{block}ffn_gate_inp.bias", (experts,), "f32"
        for name, shape in {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}.items():
            yield f"{block}ffn_{name}_exps.weight", (experts, *shape), "mxfp4" if is_oss else "bf16"
            if is_oss:
                yield f"{block}ffn_{name}_exps.bias", (experts, shape[0]), "f32"
    yield "output_norm.weight", (hidden,), "f32"
    yield "output.weight", (vocabulary, hidden), "bf16"


def write_gguf(path: Path, config: Mapping[str, Any]) -> dict[str, int]:
    """Write a file of random weights; returns bytes by name."""
    is_oss, made = "num_local_experts" in config, np.random.default_rng(0)
    writer = GGUFWriter(path, "gpt-oss" if is_oss else "qwen3moe")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(1 << 17 if is_oss else 40960)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_expert_feed_forward_length(config["intermediate_size" if is_oss else "moe_intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps", 1e-6))
    writer.add_rope_freq_base(150000.0 if is_oss else 1e6)
    writer.add_expert_count(config["num_local_experts" if is_oss else "num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    if is_oss:
        writer.add_sliding_window(128)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    kinds = {
        "bf16": (GGMLQuantizationType.BF16, np.uint8, 2), "f32": (GGMLQuantizationType.F32, np.float32, 4),
        "mxfp4": (GGMLQuantizationType.MXFP4, np.uint8, 17 / 32),
    }  # fmt: skip
    sizes = {}
    for name, shape, kind in tensors_of(config):
        number, dtype, width = kinds[kind]
        sizes[name] = int(np.prod(shape) * width)
        stored = shape if kind == "f32" else (*shape[:-1], int(shape[-1] * width))
        writer.add_tensor_info(name, stored, np.dtype(dtype), sizes[name], None if kind == "f32" else number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    # One piece again and again, at other places each time: 64 MB of random weights are more than any cache.
    pieces = {"bf16": (made.standard_normal(_PIECE // 2, np.float32) * 0.02).view(np.uint32) >> 16}
    pieces = {"bf16": pieces["bf16"].astype(np.uint16).view(np.uint8)}
    blocks = made.integers(0, 256, (_PIECE // 17, 17), np.uint8)
    blocks[:, 0] = made.integers(118, 122, len(blocks))  # 2**-9 to 2**-6
    pieces["mxfp4"] = blocks.reshape(-1)
    file = writer.fout[0]
    for name, shape, kind in tensors_of(config):
        writer.write_padding(file, file.tell())
        if kind == "f32":
            values = made.standard_normal(shape, np.float32) * 0.02
            file.write((values + 1 if "norm" in name else values).astype(np.float32).tobytes())
            continue
        for begin in range(0, sizes[name], len(pieces[kind])):
            file.write(pieces[kind][: sizes[name] - begin].data)
    writer.write_padding(file, file.tell())
    writer.close()
    return sizes


# -- runs --------------------------------------------------------------------------------------------------------------


class Running:
    """A model of llama.cpp, and a context."""

    def __init__(self, library: ctypes.CDLL, path: Path, cpu_layers: int, threads: int, is_cuda: bool) -> None:
        self._library = library
        params = library.llama_model_default_params()
        params.n_gpu_layers, params.use_mmap = 999 if is_cuda else 0, True
        patterns = [rf"blk\.{layer}\.ffn_(up|down|gate)_exps\.".encode() for layer in range(cpu_layers)]
        self._kept = (Override * (cpu_layers + 1))(*(Override(each, library.cpu_buffer_type()) for each in patterns))
        params.tensor_buft_overrides = ctypes.addressof(self._kept) if is_cuda else None
        self._model = library.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise RuntimeError(f"llama.cpp does not load {path}")
        params = library.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = CONTEXT, 2048, 2048
        params.n_threads = params.n_threads_batch = threads
        self._context = library.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError("llama.cpp makes no context")

    def run(self, tokens: list[int]) -> float:
        """Seconds of a forward of ``tokens`` behind those before."""
        begin = time.perf_counter()
        for at in range(0, len(tokens), 2048):
            part = tokens[at : at + 2048]
            given = (_I32 * len(part))(*part)
            if code := self._library.llama_decode(self._context, self._library.llama_batch_get_one(given, len(part))):
                raise RuntimeError(f"llama_decode: {code}")
        self._library.llama_synchronize(self._context)
        seconds = time.perf_counter() - begin
        first = ctypes.cast(self._library.llama_get_logits_ith(self._context, -1), ctypes.POINTER(_F32))[0]
        if not np.isfinite(first):
            raise RuntimeError(f"expected finite logits, found {first}")
        return seconds

    def use_threads(self, number: int) -> None:
        """Compute by so many threads from here on."""
        self._library.llama_set_n_threads(self._context, number, number)

    def clear(self) -> None:
        """Forget the text."""
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), True)

    def close(self) -> None:
        self._library.llama_free(self._context)
        self._library.llama_model_free(self._model)


def quiet_library(folder: Path) -> ctypes.CDLL:
    """:func:`open_library`, which prints errors alone."""
    library = open_library(folder)
    library.quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, _AT)(
        lambda level, text, _: print(text.decode(), end="") if level >= 4 else None
    )
    library.llama_log_set(library.quiet, None)
    return library


def row_of(
    library: ctypes.CDLL, name: str, given: Any, measuring: Callable[[], AbstractContextManager[object]] = nullcontext
) -> dict[str, Any]:
    """Load and measure a model; the latter within ``measuring()``."""
    is_cuda = given.device == "cuda"
    config = {**MODELS[name], **({**_TINY, **_TINY_EXPERTS} if given.tiny else {})}
    config = {key: value for key, value in config.items() if key in MODELS[name]}
    config |= {} if given.layers is None else {"num_hidden_layers": given.layers}
    path, made = given.folder / f"{name}.gguf", np.random.default_rng(1)
    begin = time.perf_counter()
    sizes = write_gguf(path, config)
    written_s, layers = time.perf_counter() - begin, config["num_hidden_layers"]
    experts = sum(size for key, size in sizes.items() if "_exps." in key) / layers
    room = parse_size(given.card) - parse_size(given.reserve)
    rest = sum(sizes.values()) - experts * layers
    on_cpu = min(layers, max(0, layers - int((room - rest) / experts))) if is_cuda else layers
    cores = len(physical_cores())
    threads = [given.threads] if given.threads else [max(1, cores // 2), max(1, cores - 2)]
    device = torch.device(given.device)
    prompts = {num: made.integers(0, config["vocab_size"], num).tolist() for num in (PROMPT_TOKENS, *given.prompts)}
    with Card(parse_size(given.card), device) if is_cuda else nullcontext() as card:
        begin = time.perf_counter()
        running = Running(library, path, on_cpu, max(threads), is_cuda)
        for first in (prompts[PROMPT_TOKENS], [1]):  # the driver compiles kernels for this GPU
            running.run(first)
        start_s = time.perf_counter() - begin
        with measuring():
            running.clear()
            running.run(prompts[PROMPT_TOKENS])
            tokens: list[int] = made.integers(0, config["vocab_size"], given.tokens + 8).tolist()
            of_threads = {}
            for number in threads:
                running.use_threads(number)
                of_threads[number] = [running.run([token]) for token in tokens][8:]
            best = min(threads, key=lambda number: sum(of_threads[number]))
            steps, rates = of_threads[best], {}
            running.use_threads(best)
            for num in given.prompts:
                for _ in range(2 if num == min(given.prompts) else 1):
                    running.clear()
                    rates[str(num)] = num / running.run(prompts[num])
            peak = card.peak_bytes() if card is not None else None
        running.close()
    path.unlink()
    return {
        "table": "peers", "peer": "llama.cpp", "model": name, "case": f"experts of {on_cpu} of {layers} layers on CPU",
        "layers": layers, "ms": float(np.mean(steps)) * 1e3, "tokens_per_s": 1 / float(np.mean(steps)),
        "prompt_tokens_per_s": rates, "threads": best, "start_s": start_s, "written_s": written_s,
        "ms_of_threads": {number: float(np.mean(each)) * 1e3 for number, each in of_threads.items()},
        "file_gb": sum(sizes.values()) / 1e9, "host_bytes": int(experts * on_cpu),
        "card_bytes": parse_size(given.card), "peak_device_bytes": peak,
        "device": torch.cuda.get_device_name(device) if is_cuda else "cpu",
    }  # fmt: skip


def describe(row: Mapping[str, Any]) -> str:
    """One line about a result."""
    prompts = ", ".join(f"{num}: {rate:.0f}" for num, rate in row["prompt_tokens_per_s"].items())
    return (
        f"{row['model']:<14} {row['case']:<34} {row['ms']:7.2f} ms  {row['tokens_per_s']:6.1f} tokens/s, prompts "
        f"{prompts} tokens/s, {row['threads']} threads, {row['file_gb']:.1f} GB written in {row['written_s']:.0f} s, "
        f"loaded in {row['start_s']:.1f} s"
    )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--library", type=Path, required=True)
    parser.add_argument("--folder", type=writable_folder, default=Path("/dev/shm"))
    parser.add_argument("--models", type=words_of(list(MODELS)), default=list(MODELS))
    parser.add_argument("--prompts", type=counts, default=[2047, 8191])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int)
    add_card_arguments(parser)
    given = parser.parse_args()
    library = quiet_library(given.library)
    rows = (row_of(library, name, given) for name in given.models)
    finish("llama.cpp", list(kept(rows, describe, given.out)))


if __name__ == "__main__":
    main()
