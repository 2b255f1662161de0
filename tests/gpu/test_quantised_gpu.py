"""Quantised checkpoints on a GPU: the bits of their library's own model, loaded and offloaded, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import transformers
from transformers.quantizers import HfQuantizer

import plain_fp8
from headrace.errors import HeadraceError
from quantised_checkpoints import FORMATS, by_load, by_offload

pytestmark = pytest.mark.filterwarnings("ignore::headrace.HeadraceWarning")

REFUSED = {(by_load, "bitsandbytes int8"), (by_offload, "bitsandbytes int8")}
REFUSED |= {(by_offload, name) for name in FORMATS if name.startswith("compressed-tensors") and "dequ" not in name}


@pytest.mark.parametrize("way", [by_load, by_offload])
@pytest.mark.parametrize("name", FORMATS)
def test_equals_the_library(name: str, way: Callable[[Path, str], tuple[bool, int]], tmp_path: Path) -> None:
    if not FORMATS[name].is_here:
        pytest.skip(f"{FORMATS[name].package} is not installed")
    transformers.logging.set_verbosity_error()
    plain_fp8.install()
    folder = FORMATS[name].write(tmp_path)
    is_old = way is by_load and not hasattr(HfQuantizer, "get_new_dtype")
    if is_old or (way, name) in REFUSED:
        with pytest.raises(HeadraceError, match="transformers 5.23 or newer" if is_old else "expected weights that"):
            way(folder, "cuda")
        return
    equal, moved = way(folder, "cuda")
    assert equal
    assert moved > 0
