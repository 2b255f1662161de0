"""One engine of SGLang itself on a CPU: ``python sglang_cpu_engine.py FOLDER CASE`` writes ``CASE.json`` there.

SGLang has no compiled kernels for CPUs on the package index; without them its layers run their PyTorch code
(``without_sgl_kernel``).
"""

from __future__ import annotations

import json
import os
import sys
import tomllib
from pathlib import Path
from typing import Any

import headrace

ROOT = Path(__file__).resolve().parents[2]
LAYERS, WIDTH = 8, 256
# Flags of SGLang, and HEADRACE_SGLANG; without it headrace is installed and not asked for.
CASES: dict[str, tuple[dict[str, Any], str | None]] = {
    "resident": ({}, None),
    "fresh": ({}, None),
    "moe-resident": ({}, None),
    "prefetch": ({"offload_group_size": 4}, "1"),
    "several": ({"offload_group_size": 4, "offload_num_in_group": 3, "offload_prefetch_step": 2}, "1"),
    "named": ({"offload_group_size": 2}, '{"params": ["mlp"]}'),
    "limited": ({"cpu_offload_gb": 1}, "1"),
    "budget": ({}, '{"device_memory": "6MiB", "batch": [1, 4]}'),
    "moe-prefetch": ({"offload_group_size": 2, "offload_prefetch_step": 2}, "1"),
    "lora": ({"offload_group_size": 4, "enable_lora": True, "max_lora_rank": 8, "lora_target_modules": ["all"]}, "1"),
    "nothing": ({}, "1"),
    "invalid": ({}, '{"device_memroy": "6MiB"}'),
}
UPDATED = ("prefetch", "limited", "budget")
PROMPTS = [[1, 2, 3, 4], [5, 6, 7], list(range(20, 60))]


def make_model(folder: Path, moe: bool, is_new: bool = False) -> Path:
    """A tiny checkpoint of random bf16 weights, once; ``is_new``: another one."""
    import torch
    import transformers

    model = folder / ("moe" if moe else "new" if is_new else "dense")
    if (model / "config.json").exists():
        return model
    sizes: dict[str, Any] = {
        "vocab_size": 512, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512, "tie_word_embeddings": False,
    }  # fmt: skip
    if moe:
        config = transformers.Qwen3MoeConfig(
            **sizes, intermediate_size=512, moe_intermediate_size=128, num_experts=8, num_experts_per_tok=2
        )
    else:
        config = transformers.Qwen3Config(**sizes, intermediate_size=512)
    torch.manual_seed(is_new)
    made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    made.save_pretrained(model)
    return model


def install(folder: Path) -> Path:
    """A folder whose metadata declare the entry points of this tree, as an installed package's do."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    metadata = folder / "installed" / f"headrace-{headrace.__version__}.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: headrace\nVersion: {headrace.__version__}\n")
    points = declared["entry-points"]["sglang.srt.plugins"]
    lines = ["[sglang.srt.plugins]", *(f"{name} = {target}" for name, target in points.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    return metadata.parent


def generate(engine: Any) -> dict[str, Any]:
    answers = engine.generate(
        input_ids=PROMPTS,
        sampling_params={"temperature": 0, "max_new_tokens": 12, "ignore_eos": True},
        return_logprob=True,
    )
    return {
        "tokens": [answer["output_ids"] for answer in answers],
        "logprobs": [answer["meta_info"]["output_token_logprobs"] for answer in answers],
    }


def update(engine: Any, folder: Path) -> dict[str, Any]:
    """What the engine answers to each update, and after it; at the end it has the weights that it came with."""
    import torch
    from safetensors.torch import load_file

    found: dict[str, Any] = {}
    old = load_file(make_model(folder, False) / "model.safetensors")
    new = load_file(make_model(folder, False, is_new=True) / "model.safetensors")
    wrong = [("model.layers.3.mlp.down_proj.weight", torch.zeros(5, dtype=torch.bfloat16))]

    def session(weights: list[tuple[str, Any]]) -> Any:
        engine.begin_weight_update()
        for first in range(0, len(weights), 20):
            engine.update_weights_from_tensor(weights[first : first + 20])
        found["in a session"] = generate(engine)
        return engine.end_weight_update()

    for name, act in {
        "no folder": lambda: engine.update_weights_from_disk(str(folder / "no such folder")),
        "wrong": lambda: session([*new.items(), *wrong]),
        "disk": lambda: engine.update_weights_from_disk(str(folder / "new")),
        "tensors": lambda: session([*old.items()]),
    }.items():
        answer = act()
        found[name] = {"answer": answer, **generate(engine)}
    return found


def main(folder: Path, case: str) -> None:
    import sglang
    from sglang.srt.managers.io_struct import CheckWeightsReqInput

    flags, _ = CASES[case]
    model = make_model(folder, case.startswith("moe"), case == "fresh")
    engine = sglang.Engine(
        model_path=str(model), device="cpu", attention_backend="torch_native",
        skip_tokenizer_init=True, disable_cuda_graph=True, max_total_tokens=2048, max_running_requests=8,
        skip_server_warmup=True, log_level="info", **flags,
    )  # fmt: skip
    found = generate(engine)
    found["stats"] = engine.get_server_info()["internal_states"][0].get("headrace")
    found["imported"] = sorted(name for name in sys.modules if name.partition(".")[0] == "headrace")
    if case == "prefetch":
        checked = engine.tokenizer_manager.check_weights(CheckWeightsReqInput(action="checksum"))
        found["checked"] = engine.loop.run_until_complete(checked)
        found["read"] = engine.get_weights_by_name("model.layers.3.mlp.down_proj.weight")
        try:
            engine.release_memory_occupation()
        except Exception as error:
            found["released"] = str(error)
    if case in UPDATED:
        found |= update(engine, folder)
    if case in ("prefetch", "resident"):
        saved = folder / f"{case}-saved"
        saved.mkdir(exist_ok=True)
        engine.collective_rpc("save_sharded_model", path=str(saved), pattern=None, max_size=None)
        found["again"] = generate(engine)
    (folder / f"{case}.json").write_text(json.dumps(found, default=str))
    engine.shutdown()


def environment(folder: Path, case: str) -> dict[str, str]:
    """For a process that runs :func:`main`."""
    places = [ROOT / "src", install(folder), ROOT / "tests/support/without_sgl_kernel"]
    places.append(ROOT / "tests/support/without_operators")
    environ = {name: value for name, value in os.environ.items() if name != "HEADRACE_SGLANG"}
    asked = CASES[case][1]
    return {
        **environ,
        **({"HEADRACE_SGLANG": asked} if asked is not None else {}),
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(map(str, places)),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
