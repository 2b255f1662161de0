"""The vLLM that is installed has every name, parameter, field and call that headrace relies on."""

from __future__ import annotations

import pytest

from headrace.adapters.vllm.interface import differences, require_supported

vllm = pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'headrace[vllm]'")


def test_the_interface_is_as_expected() -> None:
    assert differences(vllm.__version__) == []


def test_the_version_is_supported() -> None:
    require_supported(vllm.__version__)
