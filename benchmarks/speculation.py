"""Speculation with a small decoder that was trained on this repository's docs, and a smaller one as its draft.

    python benchmarks/speculation.py FOLDER [--prompts 100] [--new-tokens 48] [--steps 500] [--out FILE]

FOLDER keeps the models (6.3 and 1.0 million weights, a byte-pair tokenizer); the first call trains them, some minutes
on two cores. Then each prompt, a passage of the docs, is continued greedily: plain, with lookup, and with the draft, by
the resident model and by one of which every layer is prefetched. ``equal`` counts answers equal to the resident model's
run the same way, ``as_plain`` those equal to plain greedy decoding: a product of one row and one of several may round
differently where two tokens are almost as likely. ``predicted`` is the rate of a plan given the measured tokens a pass,
relative to the measured plain rate.
"""

from __future__ import annotations

import copy
import itertools
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from harness import append, finish, parser_of
from headrace import Prefetch, Speculation
from headrace.adapters.transformers import load
from headrace.adapters.transformers.speculating import Speculating
from headrace.errors import HeadraceWarning
from headrace.plan_model import plan_model
from headrace.planning.request import PlanRequest

ROOT = Path(__file__).resolve().parent.parent
VOCABULARY, WINDOW, BATCH, GUESSES = 2048, 128, 16, 4
SHAPES = {"target": (256, 6), "draft": (128, 2)}  # hidden size, layers
EVERY_LAYER = Prefetch(group_size=1, num_in_group=1, prefetch_step=2)


def texts() -> str:
    """All documents of the repository."""
    return "\n\n".join(path.read_text() for path in sorted((ROOT / "docs").rglob("*.md")))


def train(folder: Path, steps: int) -> None:
    """Write both models, each with the tokenizer."""
    made = ByteLevelBPETokenizer()
    made.train_from_iterator([texts()], vocab_size=VOCABULARY, show_progress=False)
    words = PreTrainedTokenizerFast(tokenizer_object=made._tokenizer)
    tokens = torch.tensor(words(texts()).input_ids)
    for name, (hidden, layers) in SHAPES.items():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
            num_attention_heads=hidden // 64, max_position_embeddings=512, eos_token_id=None, bos_token_id=None,
        )  # fmt: skip
        model = LlamaForCausalLM(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
        for step in range(steps):
            starts = torch.randint(0, len(tokens) - WINDOW, (BATCH,))
            batch = torch.stack([tokens[start : start + WINDOW] for start in starts])
            loss = model(batch, labels=batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if step % 100 == 99:
                print(f"{name}: step {step + 1}, loss {loss.item():.2f}", flush=True)
        model.save_pretrained(folder / name)
        words.save_pretrained(folder / name)


def answers(model: Any, prompts: list[torch.Tensor], new_tokens: int) -> tuple[list[list[int]], float]:
    """Tokens of each answer, and tokens a second."""
    model.generate(prompts[0], max_new_tokens=4, do_sample=False, pad_token_id=0)
    begin = time.perf_counter()
    found = [model.generate(p, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)[0].tolist() for p in prompts]
    return found, len(prompts) * new_tokens / (time.perf_counter() - begin)


def measure(folder: Path, prompts: list[torch.Tensor], new_tokens: int) -> list[dict[str, Any]]:
    target = folder / "target"
    guessers = (None, Speculation("lookup", GUESSES), Speculation(str(folder / "draft"), GUESSES))
    rows: list[dict[str, Any]] = []
    for speculation in guessers:
        # A copy has its weights at multiples of 64 bytes, as contract 1 wants of a reference.
        resident = copy.deepcopy(LlamaForCausalLM.from_pretrained(target).eval())
        if speculation is not None:
            Speculating(resident, speculation, torch.device("cpu")).attach()
        model, handle = load(target, EVERY_LAYER, device="cpu", speculate=speculation)
        expected, _ = answers(resident, prompts, new_tokens)
        found, tokens_per_s = answers(model, prompts, new_tokens)
        counts = handle.stats().speculation
        plain = rows[0] if rows else {"answers": found, "tokens_per_s": tokens_per_s}
        row = {
            "table": "speculation", "case": "plain" if counts is None else Path(counts.guesser).name,
            "prompts": len(prompts), "guesses": None if counts is None else counts.guesses,
            "tokens_per_pass": None if counts is None else counts.tokens_per_pass,
            "equal": sum(a == b for a, b in zip(found, expected, strict=True)),
            "as_plain": sum(a == b for a, b in zip(found, plain["answers"], strict=True)),
            "tokens_per_s": tokens_per_s, "bytes_moved": handle.stats().bytes_moved, "answers": found,
            "bit_equal": found == expected and handle.stats().bytes_moved > 0,
        }  # fmt: skip
        if speculation is not None and counts is not None:
            given = Speculation(speculation.guesser, GUESSES, max(1.0, counts.tokens_per_pass))
            planned = plan_model(PlanRequest(str(target), EVERY_LAYER, device="cpu", speculation=given)).speculation
            assert planned is not None
            ratio = planned.tokens_per_s / planned.plain_tokens_per_s
            row |= {"predicted": ratio, "measured": tokens_per_s / plain["tokens_per_s"]}
        rows.append(row)
        handle.remove()
    return [{key: value for key, value in row.items() if key != "answers"} for row in rows]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--steps", type=int, default=500)
    given = parser.parse_args()
    warnings.simplefilter("ignore", HeadraceWarning)  # such small models need not be faster
    if not all((given.folder / name / "model.safetensors").exists() for name in SHAPES):
        train(given.folder, given.steps)
    tokens = torch.tensor(
        AutoTokenizer.from_pretrained(given.folder / "target", trust_remote_code=False)(texts()).input_ids
    )
    starts = torch.linspace(0, len(tokens) - 200, given.prompts).long()
    rows = measure(given.folder, [tokens[start : start + 96][None] for start in starts], given.new_tokens)
    for row in rows:
        append(row, given.out)
        print(" ".join(f"{name}={value}" for name, value in itertools.islice(row.items(), 1, None)), flush=True)
    finish("speculation", rows)


if __name__ == "__main__":
    main()
