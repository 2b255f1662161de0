"""Runs a case of ``vllm_cpu_engine.py`` in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PATHS = (ROOT / "src", ROOT / "benchmarks", HERE, HERE / "without_operators")


def run_engine(
    folder: Path, case: str, mode: str = "eager", timeout_s: float | None = None, **variables: str
) -> dict[str, Any]:
    """What an engine of this case and mode gives, which is kept in ``folder``; ``variables``: of its environment."""
    kept = folder / f"{case.replace('/', ' ')}-{mode}.json"
    if not kept.exists():
        environment = {
            **os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CACHE_ROOT": str(folder / "cache"), "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join(map(str, PATHS)), **variables,
        }  # fmt: skip
        command = [sys.executable, str(HERE / "vllm_cpu_engine.py"), str(folder), case, mode]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=timeout_s)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found: dict[str, Any] = json.loads(kept.read_text())
    return found
