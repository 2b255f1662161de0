"""A seeded generator of models and programs that judges headrace on a CPU; ``scripts/fuzz`` runs it.

A case is data (:class:`fuzz_judge.CaseSpec`), so that it can be printed, run again and made smaller.

    scripts/fuzz --cases 10000 --seed 0 --jobs 2     run, print a summary, exit with 1 if a case is bad
    python tests/support/fuzz.py --seed 17           run one case again and print it; --shrink makes it smaller first
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for `python -m tests.fuzz`

from fuzz_judge import BAD, OUTCOMES, CaseSpec, PolicySpec, Verdict, judge, no_offload
from fuzz_models import ROUTED, SAFE, TRAPS, ModelSpec
from fuzz_steps import NOT_STATEFUL, OTHERS, STEPS
from isolated import run_jobs, serve

LIMIT_S = 20.0  # of CPU time for one case, or without any; what takes longer hangs
COMMAND = [sys.executable, str(Path(__file__).resolve()), "--worker"]
# What a step needs to have an effect.
NEEDS = {
    "late": ("Late",), "decode": ("Decode",), "write_inside": ("Writer",), "raise_inside": ("Raiser",),
    "unwrap": ("Wrapper",),
}  # fmt: skip

PLAIN_STEPS = {"forward", "autocast", "state_dict", "again", "raise_inside", "two_threads", "other_thread", "outer"}


def generate(seed: int) -> CaseSpec:
    """The case of a seed."""
    rng = random.Random(seed)
    model = _model(rng, seed)
    steps = _steps(rng, model)
    model = _fit(rng, model, steps)
    if rng.random() < 0.15:
        model, steps = _without_traps(model, steps)
    checkpoint = rng.random() < 0.4
    policy = _policy(rng, checkpoint)
    if policy.kind == "budget" and policy.mode != "disk" and seed % 2:  # beside a peer, which holds some of the units
        policy = dataclasses.replace(policy, mode="cpu", peer=0.3)
    if seed % 3 and model.dtype == "bfloat16" and policy.kind != "uva" and policy.mode != "disk":
        policy = dataclasses.replace(policy, codec="exp3")
    if seed % 4 == 1:
        model, policy = _with_cached_experts(random.Random(seed), model, checkpoint)
    return CaseSpec(
        seed,
        model,
        policy,
        steps,
        grad=rng.choice(["no_grad", "no_grad", "inference", "grad"]),
        checkpoint=checkpoint,
        debug=rng.random() < 0.1,
    )


def _with_cached_experts(rng: random.Random, model: ModelSpec, checkpoint: bool) -> tuple[ModelSpec, PolicySpec]:
    """Some layers have experts of which a part is in slots; one may read them in an odd way."""
    layers = [(("Routed", option) if rng.random() < 0.6 else (kind, option)) for kind, option in model.layers]
    layers[rng.randrange(len(layers))] = ("RoutedOddly" if rng.random() < 0.3 else "Routed", rng.randrange(100))
    others = rng.choice([(), (("ALL_MODEL_PARAMS", "prefetch"),), (("re:.*gate.*", "uva"),)])
    rules = (("re:.*(bank|scale)", "cache"), *others)
    policy = PolicySpec("rules", prefetch_step=rng.randint(1, 2), rules=rules, expert_slots=rng.choice([1, 2, 3, 4, 6]))
    if checkpoint and rng.random() < 0.7:
        policy = dataclasses.replace(policy, mode="disk")
    return dataclasses.replace(model, layers=tuple(layers)), policy


def _model(rng: random.Random, seed: int) -> ModelSpec:
    """Two to six layers, mostly alike, since a stack of layers is what policies look for; up to three traps."""
    base = rng.choice(SAFE[:2] * 3 + SAFE).__name__
    layers = [(base, rng.randrange(100))] * rng.randint(2, 5)
    for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
        trap = rng.choice(TRAPS).__name__
        if rng.random() < 0.4:  # the whole stack is of that kind
            layers = [(trap, rng.randrange(100))] * len(layers)
        else:
            layers[rng.randrange(len(layers))] = (trap, rng.randrange(100))
    embed = rng.random() < 0.25
    pair = lambda: (rng.randrange(len(layers)), rng.randrange(len(layers)))  # noqa: E731
    return ModelSpec(
        tuple(layers),
        dim=rng.choice([128, 128, 128, 192]),
        dtype=rng.choice(["float32"] * 4 + ["bfloat16"]),
        container=rng.choice(["list", "list", "sequential", "dict", "deep", "attributes"]),
        shared=(pair(),) if rng.random() < 0.12 else (),
        ties=(pair(),) if rng.random() < 0.15 else (),
        embed=embed,
        head=rng.choice(["none", "own", "tied", "functional"]) if embed else rng.choice(["none", "none", "own"]),
        other=rng.choice(["parameter", "module"]) if rng.random() < 0.12 else "none",
        seed=seed,
        order=tuple(rng.randrange(len(layers)) for _ in range(rng.randint(1, 6))) if rng.random() < 0.12 else (),
    )


def _steps(rng: random.Random, model: ModelSpec) -> tuple[tuple[str, int], ...]:
    """One to seven steps; most programs begin with a forward."""
    stateful = any(kind in ("Keeps", "Counts") for kind, _ in model.layers)
    names = [
        name
        for name in STEPS
        if not (name in OTHERS and model.other == "none") and not (name in NOT_STATEFUL and stateful)
    ]
    weights = [STEPS[name].weight * (4 if name in OTHERS else 1) for name in names]
    drawn = rng.choices(names, weights, k=rng.randint(1, 6))
    if rng.random() < 0.7:
        drawn.insert(0, "forward")
    if rng.random() < 0.3:
        drawn = [name for step in drawn for name in (step, "read_any")]
    return tuple((name, rng.randrange(1000)) for name in drawn)


def _fit(rng: random.Random, model: ModelSpec, steps: tuple[tuple[str, int], ...]) -> ModelSpec:
    """Most steps that need a layer of some kind find one."""
    layers = list(model.layers)
    for name, _ in steps:
        for kind in NEEDS.get(name, ()):
            if rng.random() < 0.6 and kind not in [found for found, _ in layers]:
                layers[rng.randrange(len(layers))] = (kind, rng.randrange(100))
    return dataclasses.replace(model, layers=tuple(layers))


def _without_traps(
    model: ModelSpec, steps: tuple[tuple[str, int], ...]
) -> tuple[ModelSpec, tuple[tuple[str, int], ...]]:
    """The nearest case that a runtime may not refuse."""
    safe = {kind.__name__ for kind in SAFE}
    layers = tuple((kind if kind in safe else "Plain", option) for kind, option in model.layers)
    head = model.head if model.head in ("none", "own") else "own"
    model = dataclasses.replace(model, layers=layers, shared=(), ties=(), order=(), other="none", head=head)
    return model, tuple((name if name in PLAIN_STEPS else "forward", arg) for name, arg in steps)


def _policy(rng: random.Random, checkpoint: bool) -> PolicySpec:
    mode = rng.choice(["cpu", "disk", "disk"]) if checkpoint else "cpu"
    params = rng.choice([(), (), ("ALL_MODEL_PARAMS",), ("ALL_MODEL_PARAMS",), ("re:.*weight.*",)])
    step = rng.randint(1, 3)
    kind = rng.choice(["prefetch", "prefetch", "budget", "budget", "uva", "rules"])
    if kind == "prefetch":
        size = rng.choice([1, 1, 2, 3])
        return PolicySpec(kind, size, rng.randint(1, size), step, params, mode=mode)
    share = rng.uniform(0.3, 0.8)
    if kind == "budget":
        return PolicySpec(kind, params=params, share=share, mode=rng.choice([None, None, mode]))
    if kind == "uva":
        return PolicySpec(kind, params=params, share=rng.choice([share, 1.0]), mode=mode)
    rules = rng.choice(
        [
            (("ALL_MODEL_PARAMS", "prefetch"),),
            (("re:.*0.*", "uva"), ("ALL_MODEL_PARAMS", "prefetch")),
            (("re:.*bias", "resident"), ("re:.*weight.*", "prefetch")),
            (("re:.*1.*", "prefetch"),),
            (("ALL_MODEL_PARAMS", "uva"),),
        ]
    )
    return PolicySpec(kind, prefetch_step=step, rules=rules, mode=mode)


def shrink(case: CaseSpec, outcome: str, limit_s: float = 8.0) -> CaseSpec:
    """A smaller case with the same outcome, as far as ``limit_s`` seconds go."""
    deadline = time.monotonic() + limit_s
    progress = True
    while progress:
        progress = False
        for smaller in _smaller(case):
            if time.monotonic() > deadline:
                return case
            if judge(smaller).outcome == outcome:
                case, progress = smaller, True
                break
    return case


def _smaller(case: CaseSpec) -> Iterator[CaseSpec]:
    """Cases that lack something that ``case`` has."""
    model = case.model
    for index in range(len(case.steps)):
        yield dataclasses.replace(case, steps=case.steps[:index] + case.steps[index + 1 :])
    for index in range(len(model.layers) if len(model.layers) > 1 else 0):
        layers = model.layers[:index] + model.layers[index + 1 :]
        yield dataclasses.replace(case, model=dataclasses.replace(model, layers=layers))
    for index, (kind, _) in enumerate(model.layers):
        if kind != "Plain":
            layers = (*model.layers[:index], ("Plain", 0), *model.layers[index + 1 :])
            yield dataclasses.replace(case, model=dataclasses.replace(model, layers=layers))
    plain = {"shared": (), "ties": (), "other": "none", "head": "none", "embed": False, "order": ()}
    plain |= {"dtype": "float32", "container": "list", "dim": 128}
    for name, value in plain.items():
        if getattr(model, name) != value:
            yield dataclasses.replace(case, model=dataclasses.replace(model, **{name: value}))
    policies = [PolicySpec("prefetch"), PolicySpec("prefetch", params=("ALL_MODEL_PARAMS",))]
    for changed in ({"debug": False}, {"grad": "no_grad"}, {"checkpoint": False, "policy": policies[0]}):
        if any(getattr(case, name) != value for name, value in changed.items() if name != "policy"):
            yield dataclasses.replace(case, **changed)
    if case.policy not in policies:
        for policy in policies:
            yield dataclasses.replace(case, policy=policy)


def describe(case: CaseSpec) -> str:
    """A case in lines."""
    default = ModelSpec(())
    options = {
        f.name: getattr(case.model, f.name)
        for f in dataclasses.fields(ModelSpec)
        if f.name not in ("layers", "seed") and getattr(case.model, f.name) != getattr(default, f.name)
    }
    policy = ", ".join(
        f"{f.name}={getattr(case.policy, f.name)!r}"
        for f in dataclasses.fields(PolicySpec)
        if f.name == "kind" or getattr(case.policy, f.name) != f.default
    )
    lines = [
        f"layers: {', '.join(f'{kind}({option})' for kind, option in case.model.layers)}",
        f"model:  {options or '-'}",
        f"policy: {policy}; checkpoint={case.checkpoint} grad={case.grad} debug={case.debug}",
        f"steps:  {', '.join(f'{name}({arg})' for name, arg in case.steps) or '-'}",
    ]
    return "\n".join(f"    {line}" for line in lines)


def signature(case: CaseSpec, verdict_where: str) -> str:
    """What cases of one kind have in common, for counting: the step that decided, the traps, the policy."""
    traps = {kind.__name__ for kind in (*TRAPS, *ROUTED)}
    layers = sorted({kind for kind, _ in case.model.layers if kind in traps})
    extras = [name for name in ("shared", "ties", "order") if getattr(case.model, name)]
    extras += [f"other {case.model.other}"] if case.model.other != "none" else []
    extras += [f"head {case.model.head}"] if case.model.head in ("tied", "functional") else []
    where = " ".join(word for word in verdict_where.split(",")[0].split() if not word.isdigit())
    steps = sorted({name for name, _ in case.steps} - {"forward"} - {where})
    return f"{where} | {' '.join([*layers, *extras]) or 'plain'} | {' '.join(steps) or '-'} | {case.policy.kind}"


def is_plain(case: CaseSpec) -> bool:
    """Whether nothing in ``case`` is a trap: a runtime that refuses it refuses too much."""
    model = case.model
    safe = {kind.__name__ for kind in SAFE} | {"Routed", "Raiser", "Wrapper", "Writer", "Late", "Decode"}
    plain_model = not (model.shared or model.ties or model.order or model.other != "none")
    plain_model &= model.head in ("none", "own") and all(kind in safe for kind, _ in model.layers)
    return plain_model and all(name in PLAIN_STEPS for name, _ in case.steps)


def _work(job: dict[str, Any]) -> dict[str, Any]:
    """A job of a worker: judge one seed, and make it smaller if it is bad."""
    case = generate(job["seed"])
    plain = is_plain(case)
    start = time.process_time()
    if job["resident"]:
        verdict = judge(case, offload=no_offload)
    else:
        verdict = judge(case)
    took = time.process_time() - start
    if verdict.outcome in ("DIFFERS", "CRASHED") and job["shrink"]:
        smaller = shrink(case, verdict.outcome)
        again = judge(smaller)
        if again.outcome == verdict.outcome:
            case, verdict = smaller, again
    return {
        "outcome": verdict.outcome,
        "plain": plain,
        "where": verdict.where,
        "notes": [*verdict.notes[-4:], verdict.why],  # what decided comes last
        "case": describe(case),
        "signature": signature(case, verdict.where),
        "cpu_s": took,
    }


def run_cases(
    seeds: list[int], jobs: int, shrink_bad: bool = False, limit_s: float = LIMIT_S, resident: bool = False
) -> Iterator[Any]:
    """Pairs of a seed and its result, from worker processes. ``resident``: nothing is offloaded."""
    todo = [{"seed": seed, "shrink": shrink_bad, "resident": resident} for seed in seeds]
    for job, result in run_jobs(COMMAND, todo, jobs, limit_s + (12.0 if shrink_bad else 0.0)):
        if "outcome" not in result:
            kind, text = next(iter(result.items()))
            outcome = "HUNG" if kind == "hung" else "CRASHED"
            case = generate(job["seed"])
            where = f"the process {kind}"
            result = {"outcome": outcome, "where": where, "notes": [text], "case": describe(case), "cpu_s": 0.0}
            result["plain"] = is_plain(case)
            result["signature"] = signature(case, where)
        yield job["seed"], result


def campaign(args: argparse.Namespace) -> int:
    """Many seeds; a summary, and every bad case."""
    start, outcomes, kinds, refusals, plain = time.monotonic(), Counter(), Counter(), Counter(), Counter()
    examples: dict[str, int] = {}
    seeds = list(range(args.seed, args.seed + args.cases))
    for seed, result in run_cases(seeds, args.jobs, args.shrink, args.limit, args.resident):
        if time.monotonic() - start > args.minutes * 60:
            break
        outcomes[result["outcome"]] += 1
        plain["all"] += result["plain"]
        if result["outcome"] == "refused":
            if result["plain"]:
                plain["refused"] += 1
                print(f"seed {seed}: refused without a trap: {result['notes'][-1][: args.width]}", flush=True)
            refusals["offload" if result["where"] == "offload" else "later"] += 1
        if result["outcome"] in BAD:
            kind = f"{result['outcome']} {result['signature']}"
            kinds[kind] += 1
            examples.setdefault(kind, seed)
            if not args.quiet:
                note = result["notes"][-1] if result["notes"] else ""
                print(f"seed {seed}: {result['outcome']} {note[: args.width]}\n{result['case']}", flush=True)
    took = time.monotonic() - start
    cases = outcomes.total()
    print(f"{cases} cases in {took:.1f} s, {cases / took:.1f} cases/s with {args.jobs} processes")
    print(", ".join(f"{name} {outcomes[name]}" for name in OUTCOMES), f"(refused by offload(): {refusals['offload']})")
    print(f"{plain['refused']} of {plain['all']} cases without a trap are refused")
    for kind, count in kinds.most_common(args.kinds):
        print(f"{count:6} {kind} (seed {examples[kind]})")
    return int(any(outcomes[name] for name in BAD))


def replay(args: argparse.Namespace) -> int:
    """One case in this process, with everything it does."""
    case = generate(args.seed)
    if args.shrink and (first := judge(case)).outcome in BAD:
        case = shrink(case, first.outcome, 60.0)
    print(describe(case))
    verdict: Verdict = judge(case, lambda line: print(f"  {line}", flush=True))
    print(f"{verdict.outcome} {verdict.where}")
    for note in verdict.notes:
        print(f"  {note}")
    return int(verdict.outcome in BAD)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1, help="how many seeds, from --seed on; 1 prints the case")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after which no further case counts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="worker processes")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds of CPU time for a case")
    parser.add_argument("--shrink", action="store_true", help="make bad cases smaller before they are printed")
    parser.add_argument("--resident", action="store_true", help="offload nothing: what differs is the fuzzer's fault")
    parser.add_argument("--quiet", action="store_true", help="the summary only")
    parser.add_argument("--width", type=int, default=600, help="of what is printed of an error")
    parser.add_argument("--kinds", type=int, default=60, help="how many kinds of bad cases the summary lists")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ.setdefault("HEADRACE_READERS", "2")
    os.environ.setdefault("TRITON_INTERPRET", "1")  # for the kernels of cached experts
    import torch

    torch.set_num_threads(1)
    if args.worker:
        serve(_work)
        return 0
    return replay(args) if args.cases == 1 else campaign(args)


if __name__ == "__main__":
    sys.exit(main())
