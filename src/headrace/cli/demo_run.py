"""The runs of ``headrace demo``: a language model of 1 GB generates text, resident and streamed from its files.

Each run has a process of its own. Its memory is measured after the imports and a run of a tiny model. The results have
to be bit-identical. Nothing is downloaded: the model has Qwen3's architecture, seeded random weights and a byte-level
tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from safetensors import SafetensorError

from headrace.adapters.transformers import load
from headrace.checkpoint.safetensors_header import Checkpoint
from headrace.errors import OptionError, StateError
from headrace.formatting import format_rate, format_size, size_unit
from headrace.memory.system import PeakMeter, require_disk
from headrace.plan.tables import titled_table

# Contract 3: the peak of device memory exceeds the plan by at most this, for activations and buffers.
TOLERANCE_BYTES = 64 * 2**20
_MARK = "headrace-demo.json"
_VOCABULARY = 258  # every byte, and two special tokens
_HEADROOM_BYTES = 64 * 2**20  # for headers, the tokenizer, the trace
# Texts of equal length need no padding with byte-level tokens. Few and short, so that most memory is weights.
_PROMPTS = ("Water runs where there is a slope, ", "and turns a wheel on the way down. ")


# -- the model ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelSize:
    """Shape of the model; the default weighs 1.16 GB in float32."""

    hidden: int = 1024
    intermediate: int = 3072
    layers: int = 24
    heads: int = 16
    key_value_heads: int = 4  # few, so that the KV cache adds little to the measured memory
    seed: int = 20

    def build(self) -> Any:
        """The model with its weights; under ``torch.device("meta")`` without them."""
        from transformers import Qwen3Config, Qwen3ForCausalLM

        config = Qwen3Config(
            vocab_size=_VOCABULARY,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_value_heads,
            head_dim=self.hidden // self.heads,
            max_position_embeddings=4096,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,  # every text then has the same number of tokens
            pad_token_id=_VOCABULARY - 1,
            dtype="float32",
        )
        # Random weights make no sensible text, but run through the same code as trained ones.
        torch.manual_seed(self.seed)
        model: Any = Qwen3ForCausalLM(config)
        model.requires_grad_(False)
        model.model.embed_tokens.weight.normal_()  # with similar embeddings all texts would continue alike
        return model


def ensure_model(folder: Path, size: ModelSize) -> bool:
    """Write the model to ``folder`` unless it is there and complete; returns whether it was written.

    A partly written folder is removed, also after an interrupt.

    Raises:
        OptionError: the disk is too full, or ``folder`` holds something the demo did not write.
    """
    if folder.exists():
        if _is_complete(folder, size):
            return False
        if not (folder / _MARK).is_file():
            raise OptionError(
                f"{folder} exists and was not written by headrace demo; choose another place with --folder DIR"
            )
        shutil.rmtree(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with torch.device("meta"):
        num_bytes = sum(parameter.nbytes for parameter in size.build().parameters())
    require_disk(folder.parent, num_bytes + _HEADROOM_BYTES, "make room, or choose another disk with --folder DIR")
    partial = folder.with_name(f".{folder.name}.headrace-partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a run that was killed
    try:
        partial.mkdir()
        size.build().save_pretrained(partial, max_shard_size="200MB")
        # Otherwise the kernel would write the files back during the measurement.
        for path in partial.glob("*.safetensors"):
            with path.open("rb") as file:
                os.fsync(file.fileno())
        _write_tokenizer(partial)
        (partial / _MARK).write_text(json.dumps(asdict(size)))
        partial.rename(folder)  # last, so that an interrupt never leaves a partly written model under this name
    except (OSError, SafetensorError) as error:  # a SafetensorError has an OSError only as text
        raise OptionError(
            f"the model cannot be written to {folder}: {error}; choose another place with --folder DIR"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return True


def _is_complete(folder: Path, size: ModelSize) -> bool:
    """Whether ``folder`` is a model of this size; the headers and lengths of its files are checked."""
    try:
        if json.loads((folder / _MARK).read_text()) != asdict(size):
            return False
        Checkpoint.open(folder)
    except (OSError, ValueError):  # CheckpointError and JSON errors are ValueErrors
        return False
    return True


def _write_tokenizer(folder: Path) -> None:
    """A byte-level BPE without merges: one token per byte of UTF-8, and two special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|endoftext|>", "<|pad|>"]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(tokens[-2:])
    wrapped: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token=tokens[-2],
        pad_token=tokens[-1],
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )
    wrapped.save_pretrained(folder)


# -- results of both runs ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """Measurements of a run; those from ``restored_digest`` on are of a streamed run alone.

    Attributes:
        digest: sha256 of the tokens and of their logits.
        growth_bytes: the largest growth of resident memory, from before the weights until the end.
        restored_digest: digest of the same work after ``handle.remove()``.
        planned_bytes: memory for weights.
        forward_bytes: copied in one forward by the plan.
        moved_bytes: copied in total.
    """

    digest: str
    num_tokens: int
    seconds: float
    growth_bytes: int
    restored_digest: str = ""
    planned_bytes: int = 0
    forward_bytes: int = 0
    moved_bytes: int = 0

    @property
    def limit_bytes(self) -> int:
        """A streamed run may grow by this much."""
        return self.planned_bytes + TOLERANCE_BYTES


def failed_checks(resident: Result, streamed: Result) -> list[str]:
    """The checks that failed, in words."""
    grown, limit = format_size(streamed.growth_bytes), format_size(streamed.limit_bytes)
    checks = {
        "the streamed results differ from the resident ones": resident.digest == streamed.digest,
        "the results after remove() differ": resident.digest == streamed.restored_digest,
        "nothing was streamed": streamed.moved_bytes > 0,  # without, equal bits would prove nothing
        f"memory grew by {grown}, the limit is {limit}": streamed.growth_bytes <= streamed.limit_bytes,
    }
    return [failure for failure, passed in checks.items() if not passed]


def comparison_table(weight_bytes: int, resident: Result, streamed: Result) -> Table:
    """Resident against streamed, row by row."""
    runs, unit = (resident, streamed), size_unit(weight_bytes)
    planned, share = format_size(streamed.planned_bytes, unit), 100 * streamed.planned_bytes / weight_bytes
    table = titled_table("Resident and streamed", "", "resident", "streamed")
    table.add_row("planned memory for weights", format_size(weight_bytes, unit), f"{planned} ({share:.0f} %)")
    growth = (format_size(run.growth_bytes, unit) for run in runs)
    table.add_row("measured growth (with mapped file pages in use)", *growth)
    table.add_row("limit: planned + 64 MiB", "", format_size(streamed.limit_bytes, unit))
    table.add_row("tokens per second", *(format_rate(run.num_tokens / run.seconds) for run in runs))
    table.add_row("moved per forward", "", format_size(streamed.forward_bytes, unit))
    table.add_row("sha256 of the results", *(run.digest[:12] for run in runs))
    return table


# -- one run -----------------------------------------------------------------------------------------------------------


def run_alone(model: Path, budget_bytes: int | None, trace: Path, new_tokens: int = 32) -> Result:
    """:func:`run` in a fresh Python process: peak memory is counted per process and never falls.

    Raises:
        StateError: the process failed; the message has its last line of output.
    """
    child = "import sys; from headrace.cli.demo_run import run_child; run_child(sys.argv[1])"
    arguments = json.dumps([str(model), budget_bytes, str(trace), new_tokens])
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", child, arguments], env=environment, capture_output=True, check=False)
    if done.returncode != 0:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["it wrote nothing"]
        raise StateError(f"the process of this run ended with code {done.returncode}: {last[0]}")
    return Result(**json.loads(done.stdout.splitlines()[-1]))


def run_child(arguments: str) -> None:
    """:func:`run` with arguments in JSON, and its result as JSON on the last line of stdout."""
    print(json.dumps(asdict(run(*json.loads(arguments)))))


def run(folder: str | Path, budget_bytes: int | None, trace: str | Path, new_tokens: int) -> Result:
    """Generate in this process: resident without a budget, by transformers alone; else streamed by headrace.

    ``trace``: the file for the timeline of a streamed run.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    # First a run of a tiny model: memory of libraries, thread pools and kernels must not count as weights.
    _generate(ModelSize(64, 128, 2, 4, 2).build().eval(), tokenizer, 2)
    meter, handle = PeakMeter(), None
    model: Any
    if budget_bytes is None:  # the reference for the bits, without any code of headrace
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", trust_remote_code=False)
    else:
        model, handle = load(folder, budget_bytes, device="cpu")
    begin = time.perf_counter()
    digest, num_tokens = _generate(model, tokenizer, new_tokens)
    seconds, growth_bytes = time.perf_counter() - begin, meter.growth_bytes()
    if handle is None:
        return Result(digest, num_tokens, seconds, growth_bytes)
    handle.trace(trace)
    plan, moved_bytes = handle.plan, handle.stats().bytes_moved
    handle.remove()
    restored, _ = _generate(model, tokenizer, new_tokens)
    planned = plan.device_bytes, plan.moved_bytes
    return Result(digest, num_tokens, seconds, growth_bytes, restored, *planned, moved_bytes)


def _generate(model: Any, tokenizer: Any, new_tokens: int) -> tuple[str, int]:
    """Greedy continuation of the prompts: the digest of tokens and logits, and the number of tokens."""
    inputs = tokenizer(list(_PROMPTS), return_tensors="pt")
    output = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=new_tokens,
        do_sample=False,
        output_logits=True,  # equal tokens prove little about the bits
        return_dict_in_generate=True,
    )
    tokens = output.sequences[:, inputs["input_ids"].shape[1] :]
    return digest_of(tokens, *output.logits), tokens.numel()


def digest_of(*tensors: torch.Tensor) -> str:
    """sha256 of dtypes, shapes and bytes."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)} ".encode() + tensor.numpy().tobytes())
    return digest.hexdigest()
