"""The same answers from outside: lm-eval asks a server of vLLM resident, and with its weights offloaded by headrace.

    python benchmarks/lm_eval_proof.py OUT_FOLDER --lm-eval PYTHON [--model MODEL] [FLAG OF VLLM...]

PYTHON is an interpreter with ``lm_eval[api]`` and transformers, which may be in another environment than vLLM. 50
seeded questions are asked in two tasks: an answer is generated, and each of four choices is scored by its
log-likelihood. Without MODEL a tiny Qwen3 with seeded weights is written, and a byte-level tokenizer trained on the
questions. One request at a time, so that no batch differs. What lm-eval keeps of every sample (answers,
log-likelihoods, scores) has to be equal to that of ``resident``, and bytes have to have moved; otherwise the exit code
is 1. A case left out of ``--cases`` keeps what OUT_FOLDER has of it. Results are printed as JSON lines.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from seeded_models import QWEN3_TINY, write_config, write_tokenizer, write_weights
from vllm_cases import python_path
from vllm_server import API_SERVER, headrace_stats, serving

NUM_QUESTIONS = 50
CASES: dict[str, list[str]] = {
    "resident": [],
    "group": ["--offload-group-size", "4"],
    "budget": ["--additional-config", '{"headrace": {"device_memory": "BUDGET", "batch": [1]}}'],
}
COMMON = {
    "dataset_path": "json",
    "test_split": "test",
    "doc_to_text": "Question: {{question}}\nAnswer:",
}
TASKS: dict[str, dict[str, Any]] = {
    "answers": {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[label]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 24, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_choice": "choices",
        "doc_to_target": "label",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--lm-eval", required=True, metavar="PYTHON", help="of an environment with lm_eval[api]")
    parser.add_argument("--model", help="a folder or a name; a tiny one is written if none is given")
    parser.add_argument("--budget", default="20MiB", help="device memory of the case that has one")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--worker-cls", default="headrace.adapters.vllm.Worker")
    given, more = parser.parse_known_args()
    out: Path = given.out.absolute()
    questions = _write_tasks(out / "tasks")
    model = given.model or str(_write_tiny(out / "model", questions))
    is_equal = True
    for case in given.cases:
        flags = [word.replace("BUDGET", given.budget) for word in CASES[case]]
        command = [*API_SERVER, "--model", model, "--worker-cls", given.worker_cls, "--no-enable-prefix-caching"]
        environment = {**os.environ, "PYTHONPATH": python_path(out), "VLLM_SERVER_DEV_MODE": "1"}
        with serving([*command, *flags, *more], out / f"{case}.log", environment=environment) as (url, _, _):
            _ask(given.lm_eval, url, model, out, case)
            moved = headrace_stats(url).get("bytes_moved", 0)
        for task in TASKS:
            row = {"table": "lm-eval", "case": case, "task": task, **_compared(out, case, task), "bytes_moved": moved}
            is_equal &= row["bit_equal"] and (case == "resident" or moved > 0)
            print(json.dumps(row), flush=True)
    return 0 if is_equal else 1


def _write_tasks(folder: Path) -> list[dict[str, Any]]:
    """The questions and lm-eval's descriptions of the tasks, in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    chooser = random.Random(0)
    questions = []
    for _ in range(NUM_QUESTIONS):
        boxes, each, broken = chooser.randrange(2, 20), chooser.randrange(3, 50), chooser.randrange(1, 6)
        what = chooser.choice(["bolts", "apples", "letters", "candles", "tickets"])
        answer = boxes * each - broken
        choices = [answer, *chooser.sample([answer + step for step in range(-9, 10) if step], 3)]
        chooser.shuffle(choices)
        text = f"There are {boxes} boxes with {each} {what} each, and {broken} {what} are lost. How many are left?"
        questions.append(
            {"question": text, "choices": [str(choice) for choice in choices], "label": choices.index(answer)}
        )
    lines = "".join(json.dumps(question) + "\n" for question in questions)
    (folder / "questions.jsonl").write_text(lines)
    files = {"data_files": {"test": str(folder / "questions.jsonl")}}
    for name, task in TASKS.items():
        described = {"task": f"headrace_{name}", **COMMON, "dataset_kwargs": files, **task}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(described))
    return questions


def _write_tiny(folder: Path, questions: Sequence[dict[str, Any]]) -> Path:
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    texts = [f"Question: {entry['question']}\nAnswer: {' '.join(entry['choices'])}\n" for entry in questions]
    tokenizer.train_from_iterator(texts, vocab_size=QWEN3_TINY["vocab_size"], show_progress=False)
    write_config(folder, {**QWEN3_TINY, "vocab_size": tokenizer.get_vocab_size()})
    write_tokenizer(folder, tokenizer)
    write_weights(folder, "cpu")
    return folder


def _ask(python: str, url: str, model: str, out: Path, case: str) -> None:
    arguments = f"model={model},base_url={url}/v1/completions,tokenizer={model},num_concurrent=1,max_retries=1"
    command = [python, "-m", "lm_eval", "--model", "local-completions", "--model_args", arguments]
    command += ["--tasks", ",".join(f"headrace_{task}" for task in TASKS), "--include_path", str(out / "tasks")]
    command += ["--output_path", str(out / case), "--log_samples"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(out / "hub")}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | offline
    with (out / f"{case}-lm-eval.log").open("w") as log:
        subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT, check=True)


def _compared(out: Path, case: str, task: str) -> dict[str, Any]:
    """How many samples are as those of ``resident`` in everything that lm-eval keeps of them."""
    mine, wanted = (_samples(out / name, task) for name in (case, "resident"))
    equal = sum(a == b for a, b in zip(mine, wanted, strict=True))
    metric = TASKS[task]["metric_list"][0]["metric"]
    return {
        "samples": len(mine),
        "equal": equal,
        "bit_equal": equal == len(wanted) == NUM_QUESTIONS,
        "distinct": len({json.dumps(sample["resps"]) for sample in mine}),
        "score": sum(sample[metric] for sample in mine) / len(mine),
    }


def _samples(folder: Path, task: str) -> list[dict[str, Any]]:
    path = max(folder.rglob(f"samples_headrace_{task}_*.jsonl"))  # the latest, by the date in its name
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return sorted(found, key=lambda sample: int(sample["doc_id"]))


if __name__ == "__main__":
    sys.exit(main())
