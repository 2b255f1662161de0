"""The promise: whatever model and program, outputs are the resident model's or an error is raised before.

``scripts/fuzz`` runs as many cases as there is time for; these are a fixed sample.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

import fuzz
import isolated
from fuzz_judge import NoHandle, judge

NUM_CASES = 150
PLAIN = fuzz.CaseSpec(0, fuzz.ModelSpec((("Plain", 0),) * 2), fuzz.PolicySpec("prefetch"), (("forward", 1),))


def test_fixed_seeds() -> None:
    bad = []
    refused, needlessly = 0, []
    for seed, result in fuzz.run_cases(list(range(NUM_CASES)), jobs=2):
        refused += result["outcome"] == "refused"
        needlessly += [(seed, result["notes"][-1])] if result["outcome"] == "refused" and result["plain"] else []
        if result["outcome"] in fuzz.BAD:
            note = result["notes"][-1][:300] if result["notes"] else ""
            bad.append(f"seed {seed}: {result['outcome']} {note}")
    assert not bad, f"{len(bad)} of {NUM_CASES} cases (python tests/support/fuzz.py --seed N):\n" + "\n".join(bad)
    assert not needlessly, "refused without a trap"
    assert refused < NUM_CASES * 2 / 3, "most cases are refused: the generator tests little"


def test_the_recompile_limit_is_that_of_two_models() -> None:
    """The twin and the offloaded model are of the same classes, of whose code torch keeps so many versions."""
    [(_, result)] = fuzz.run_cases([704480], jobs=1)
    assert result["outcome"] == "refused", result["notes"]


def test_finds_nothing_where_nothing_is_offloaded() -> None:
    own_hooks = [708, 700885]  # in one of several compiled layers
    for seed, result in fuzz.run_cases([*range(60), *own_hooks], jobs=2, resident=True):
        assert result["outcome"] == "equal", (seed, result["notes"])


@pytest.mark.parametrize(("fault", "outcome"), [("wrong", "DIFFERS"), ("foreign", "CRASHED"), ("ours", "refused")])
def test_finds_a_planted_fault(fault: str, outcome: str) -> None:
    def offload(model: nn.Module, policy: Any, **options: Any) -> NoHandle:
        layer = model.layer_list()[1]
        if fault == "wrong":
            layer.register_forward_hook(lambda module, args, output: output + 1)
            return NoHandle()

        def fail(*args: Any) -> None:
            raise RuntimeError("offload again") if fault == "ours" else KeyError("weight")

        layer.register_forward_pre_hook(fail)
        return NoHandle()

    assert judge(PLAIN, offload=offload).outcome == outcome


def test_finds_a_lost_write() -> None:
    """A write that no forward shows, and ``remove()`` loses."""

    class Loses(NoHandle):
        def __init__(self, model: nn.Module) -> None:
            self.model = model
            self.state = {name: value.clone() for name, value in model.state_dict().items()}

        def remove(self) -> None:
            self.model.load_state_dict(self.state)

    case = fuzz.dataclasses.replace(PLAIN, steps=(("write_data", 1),))
    with torch.no_grad():
        verdict = judge(case, offload=lambda model, policy, **options: Loses(model))
    assert (verdict.outcome, verdict.where) == ("DIFFERS", "state_dict() after remove()")


def test_a_worker_that_hangs_or_dies_costs_one_job() -> None:
    code = (
        f"import sys, os, time; sys.path.insert(0, {str(isolated.HERE)!r}); import isolated\n"
        "work = {'fine': lambda: 1, 'hangs': lambda: time.sleep(99), 'dies': lambda: os._exit(3)}\n"
        "isolated.serve(lambda job: work[job]())"
    )
    jobs = ["fine", "hangs", "fine", "dies", "fine"]
    results = [result for _, result in isolated.run_jobs([sys.executable, "-c", code], jobs, 1, limit_s=1.0)]
    assert [results[0], results[2], results[4]] == [1, 1, 1]
    assert "sleep" in results[1]["hung"] or "<lambda>" in results[1]["hung"]
    assert "exit status 3" in results[3]["died"]


def test_the_limit_is_cpu_time() -> None:
    """A worker that others keep from the CPU goes on; one that uses it up does not."""
    code = (
        f"import sys, time; sys.path.insert(0, {str(isolated.HERE)!r}); import isolated\n"
        "def slow():\n"
        "    for _ in range(12):\n"
        "        time.sleep(0.2); end = time.process_time() + 0.03\n"
        "        while time.process_time() < end: pass\n"
        "def spins():\n"
        "    while True: pass\n"
        "isolated.serve(lambda job: {'slow': slow, 'spins': spins}[job]())"
    )
    results = dict(isolated.run_jobs([sys.executable, "-c", code], ["slow", "spins", "slow"], 1, limit_s=1.0))
    assert results["slow"] is None
    assert "spins" in results["spins"]["hung"]
