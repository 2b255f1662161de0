"""Speculation where 24 GB are all the device memory there is, with guesses of which a stated share is accepted.

    python benchmarks/scripted_guesses.py --out FILE [--models llama-3.3-70b-nf4,qwen3-8b] [--guessers lookup,draft]
    python benchmarks/scripted_guesses.py --device cpu --tiny        tries the script; NF4 needs bitsandbytes

Weights are random, so no draft would guess what they generate. Its guesses are made as ever, and then replaced: by the
true continuation in as many places as the script accepts, by other tokens behind those. With four guesses a pass, two
and three of them are accepted in turn: T = 3.5 tokens a pass. Kernels, bytes and the passes of the draft are those of
real guesses; T is a stated assumption.

* ``llama-3.3-70b-nf4`` (``card_24gb.py``) in a budget of ``--card`` less ``--reserve``; its draft has the shape of
  Llama-3.2-1B in bf16, and is part of the budget.
* ``qwen3-8b``: every layer is prefetched.

``predicted_tokens_per_s`` is the plan's, given T. Tokens and logits of all passes have to equal those of the resident
model that is run in the same way.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig, LogitsProcessorList
from transformers.generation.candidate_generator import AssistedCandidateGenerator, PromptLookupCandidateGenerator

import headrace
from card_24gb import Card, Clock, Rehearsal, add_card_arguments, free_memory, rest_on_host
from decoder_models import build_model
from harness import append, finish, link_bytes_per_s, parser_of, words_of
from headrace.adapters.transformers import speculating
from headrace.config import Budget, Policy, Prefetch, Workload, parse_size
from headrace.model.inventory import take_inventory
from headrace.planning import PlanResult, plan_model
from headrace.runtime.planner_factory import PlanRequest
from published_configs import LLAMA_3_2_1B

GUESSES, ACCEPTED = 4, (2, 3)
TOKENS_PER_PASS = 1 + sum(ACCEPTED) / len(ACCEPTED)
PROMPT_TOKENS, PASSES = 128, 14
GUESSERS = {"llama-3.3-70b-nf4": ("lookup", "eager draft", "draft"), "qwen3-8b": ("lookup",)}
_TINY_DRAFT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}


class Script:
    """Replaces guesses within :meth:`followed`.

    Attributes:
        truth: tokens of prompt and continuation.
    """

    def __init__(self, truth: list[int]) -> None:
        self.truth = truth
        self._accepted = itertools.cycle(ACCEPTED)

    def guesses(self, tokens: torch.Tensor, count: int) -> torch.Tensor:
        """``count`` tokens that follow ``tokens``: [1, length + count]."""
        begin, accepted = tokens.shape[1], next(self._accepted)
        following = [*self.truth[begin : begin + count], *[0] * count][:count]
        made = [token if i < accepted else token ^ 1 for i, token in enumerate(following)]
        return torch.cat([tokens, tokens.new_tensor([made])], dim=1)

    @contextmanager
    def followed(self) -> Iterator[None]:
        """All generators of guesses follow the script, from its beginning."""
        self._accepted = itertools.cycle(ACCEPTED)
        kinds: Any = (PromptLookupCandidateGenerator, AssistedCandidateGenerator, speculating._CapturedDraft)
        kept = {kind: kind.get_candidates for kind in kinds}

        def replacing(made: Callable[..., Any]) -> Callable[..., Any]:
            def get_candidates(generator: Any, tokens: torch.Tensor, **kwargs: Any) -> Any:
                found, logits = made(generator, tokens, **kwargs)
                count = found.shape[1] - tokens.shape[1] if logits is not None else GUESSES
                return self.guesses(tokens, count), logits

            return get_candidates

        try:
            for kind, made in kept.items():
                kind.get_candidates = replacing(made)
            yield
        finally:
            for kind, made in kept.items():
                kind.get_candidates = made


@dataclass(frozen=True)
class Run:
    """One ``generate``: tokens with the prompt, logits of all rows, and milliseconds of each pass after the first."""

    tokens: list[int]
    logits: torch.Tensor
    samples_ms: tuple[float, ...]
    pass_tokens: tuple[int, ...]

    @property
    def tokens_per_s(self) -> float:
        return 1e3 * sum(self.pass_tokens) / sum(self.samples_ms)

    @property
    def tokens_per_pass(self) -> float:
        return statistics.mean(self.pass_tokens)


class PassClock(Clock):
    """Counts the tokens of each pass, too."""

    def __init__(self) -> None:
        super().__init__(lambda: None)
        self.counts: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        super().put(value)
        self.counts.append(value.numel())


def run(model: Any, prompt: torch.Tensor, new_tokens: int) -> Run:
    """Greedy, from ``prompt``."""
    clock, found = PassClock(), []

    def keep(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        found.append(scores.clone())
        return scores

    tokens = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=new_tokens,
        streamer=clock,
        logits_processor=LogitsProcessorList([keep]),
    )
    logits = torch.cat([step.cpu() for step in found])
    return Run(tokens[0].tolist(), logits, tuple(clock.samples_ms()[1:]), tuple(clock.counts[2:]))


@contextmanager
def guessing(model: Any, case: str, draft: str, script: Script, device: torch.device) -> Iterator[None]:
    """``model.generate`` verifies the script's guesses; a draft is on the device meanwhile."""
    if case == "plain":
        yield
        return
    guesser = speculating.Speculating(model, speculation_of(case, draft), device, graphs=case != "eager draft")
    guesser.attach()
    try:
        with script.followed():
            yield
    finally:
        guesser.remove()
        free_memory(device)


def speculation_of(case: str, draft: str) -> headrace.Speculation:
    return headrace.Speculation("lookup" if case == "lookup" else draft, GUESSES, TOKENS_PER_PASS)


def measure(rehearsal: Rehearsal, guessers: list[str], draft: str, link: float) -> Iterator[dict[str, Any]]:
    """Rows of a model: without guesses, and by each guesser."""
    device = rehearsal.device
    model = rehearsal.build()
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
    prompt = torch.randint(1, model.config.vocab_size, (1, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0))
    prompt, passes = prompt.to(device), 6 if rehearsal.tiny else PASSES
    truth = run(model, prompt, int(passes * TOKENS_PER_PASS) + GUESSES).tokens
    cases = ["plain", *guessers]
    tokens = {case: passes if case == "plain" else int(passes * TOKENS_PER_PASS) for case in cases}
    resident: dict[str, Run] = {}
    scripts = {case: Script(truth) for case in cases}
    for case, script in scripts.items():
        for _ in range(1 if case == "plain" else 5):
            with guessing(model, case, draft, script, device):
                resident[case] = run(model, prompt, tokens[case])
            # A product of five rows may round otherwise than one of a row, and choose another token.
            found, followed = resident[case].tokens, script.truth
            script.truth = found + script.truth[len(found) :]
            if script.truth == followed:  # what is offloaded gets the same guesses
                break
        print(f"{rehearsal.name} {case}: resident {resident[case].tokens_per_s:.2f} tokens/s", flush=True)
    rest_on_host(model)
    weight_bytes = take_inventory(model).num_bytes
    policy: Policy = Prefetch(1, 1, 2)
    if "nf4" in rehearsal.name:
        policy = Budget(weight_bytes // 2 if rehearsal.tiny else rehearsal.card_bytes - rehearsal.reserve_bytes)
    with Card(rehearsal.card_bytes, device) as card:
        for case, script in scripts.items():
            planned = plan_for(model, policy, case, draft, device, len(truth))
            with headrace.offload(model, planned.plan, device=device) as handle:
                runs, moved = [], []
                for _ in range(2):
                    moved.append(handle.stats().bytes_moved)
                    with guessing(model, case, draft, script, device):
                        runs.append(run(model, prompt, tokens[case]))
                pass_bytes = (handle.stats().bytes_moved - moved[-1]) / (len(runs[-1].samples_ms) + 1)
                facts = {"peak_device_bytes": card.peak_bytes(), "layers": model.config.num_hidden_layers}
                facts |= {"link_gb_per_s": link / 1e9, "rates": planned.planner.rates.machine}
                facts |= {"is_measured": planned.planner.rates.is_measured, "pass_bytes": pass_bytes}
                facts |= {"floor_ms": pass_bytes / link * 1e3}
            yield facts | row_of(rehearsal, case, runs, resident[case], planned)


def plan_for(model: Any, policy: Policy, case: str, draft: str, device: torch.device, context: int) -> PlanResult:
    """The plan of a case; a draft is in its budget."""
    speculation = None if case == "plain" else speculation_of(case, draft)
    workload = Workload([1], context=context)
    return plan_model(PlanRequest(model, policy, workload, device=device, speculation=speculation))


def row_of(rehearsal: Rehearsal, case: str, runs: list[Run], resident: Run, planned: PlanResult) -> dict[str, Any]:
    """A result: the second of two runs is timed."""
    timed, forecast = runs[-1], planned.speculation
    plain_s = planned.planner.forecast(planned.plan, 1, PROMPT_TOKENS).step_s
    return {
        "table": "scripted-guesses", "model": rehearsal.name, "case": case,
        "rows": 1 if case == "plain" else GUESSES + 1, "tokens_per_pass": timed.tokens_per_pass,
        "passes": len(timed.samples_ms), "ms": statistics.median(timed.samples_ms),
        "spread_ms": max(timed.samples_ms) - min(timed.samples_ms), "tokens_per_s": timed.tokens_per_s,
        "resident_tokens_per_s": resident.tokens_per_s,
        "predicted_tokens_per_s": 1 / plain_s if forecast is None else forecast.tokens_per_s,
        "planned_device_bytes": planned.plan.device_bytes, "card_bytes": rehearsal.card_bytes,
        "offloaded_bytes": planned.plan.offloaded_bytes,
        "bit_equal": all(each.tokens == resident.tokens and torch.equal(each.logits, resident.logits) for each in runs),
        "device": torch.cuda.get_device_name(rehearsal.device) if rehearsal.device.type == "cuda" else "cpu",
    }  # fmt: skip


def write_draft(folder: Path, device: torch.device, tiny: bool, vocabulary: int) -> str:
    """A draft of Llama-3.2-1B's shape with seeded weights."""
    sizes = _TINY_DRAFT if tiny else {}
    config = LlamaConfig(**LLAMA_3_2_1B | sizes | {"vocab_size": vocabulary, "eos_token_id": None})
    model: Any = build_model(config, device, device)
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
    model.tie_weights()
    model.save_pretrained(folder)
    return str(folder)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--models", type=words_of(list(GUESSERS)), default=list(GUESSERS))
    parser.add_argument(
        "--guessers", type=words_of(GUESSERS["llama-3.3-70b-nf4"]), default=GUESSERS["llama-3.3-70b-nf4"]
    )
    add_card_arguments(parser)
    given = parser.parse_args()
    device = torch.device(given.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    link, rows = link_bytes_per_s(device, 5), []
    with tempfile.TemporaryDirectory() as folder:
        for name in given.models:
            sizes = parse_size(given.card), parse_size(given.reserve)
            rehearsal = Rehearsal(name, given.layers, given.tiny, *sizes, device, ["eager"])
            guessers = [each for each in GUESSERS[name] if each in given.guessers]
            draft = ""
            if any("draft" in each for each in guessers):
                draft = write_draft(Path(folder), device, given.tiny, 512 if given.tiny else 128_256)
            for row in measure(rehearsal, guessers, draft, link):
                rows.append(row)
                append(row, given.out)
                print(
                    f"{name:<18} {row['case']:<7} {row['tokens_per_s']:6.2f} tokens/s, predicted "
                    f"{row['predicted_tokens_per_s']:.2f}, plain resident {row['resident_tokens_per_s']:.2f}; a pass "
                    f"{row['ms']:.1f} ms (spread {row['spread_ms']:.1f}, floor {row['floor_ms']:.1f}), "
                    f"{row['tokens_per_pass']:.2f} tokens a pass  {'same bits' if row['bit_equal'] else 'OTHER BITS'}",
                    flush=True,
                )
            free_memory(device)
    finish("scripted guesses", rows)


if __name__ == "__main__":
    main()
