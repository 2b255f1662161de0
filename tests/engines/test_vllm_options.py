"""vLLM's offload flags and headrace's own keys: what they mean, and what is refused before an engine starts."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from engine_names import Name, differences
from headrace import UVA, Budget, Prefetch
from headrace.adapters.vllm import interface, options
from headrace.adapters.vllm.interface import require_supported
from headrace.adapters.vllm.options import read_options
from headrace.config import Workload
from headrace.errors import OptionError, OptionTypeError, SizeError
from headrace.flags import EngineOptions


def offload_config(backend: str = "auto", **flags: Any) -> SimpleNamespace:
    """What vLLM makes of its flags; the defaults are vLLM's."""
    uva = {"cpu_offload_gb": 0.0, "cpu_offload_params": set()}
    prefetch = {"offload_group_size": 0, "offload_num_in_group": 1, "offload_prefetch_step": 1, "offload_params": set()}
    for name, value in flags.items():
        (uva if name in uva else prefetch)[name] = value
    return SimpleNamespace(offload_backend=backend, uva=SimpleNamespace(**uva), prefetch=SimpleNamespace(**prefetch))


def read(flags: dict[str, Any] | None = None, own: Any = None) -> EngineOptions:
    return read_options(offload_config(**flags or {}), {} if own is None else {"headrace": own})


GROUP = {"offload_group_size": 4}
GIB = 2**30


@pytest.mark.parametrize(
    ("flags", "policy"),
    [
        ({}, None),
        (GROUP, Prefetch(4, 1, 1)),
        ({"backend": "prefetch", **GROUP}, Prefetch(4, 1, 1)),
        (
            {**GROUP, "offload_num_in_group": 2, "offload_prefetch_step": 3, "offload_params": {"w2", "w13"}},
            Prefetch(4, 2, 3, ["w13", "w2"]),
        ),
        ({"cpu_offload_gb": 1.5}, UVA(3 * GIB // 2)),
        ({"backend": "uva", "cpu_offload_gb": 10, "cpu_offload_params": {"experts"}}, UVA(10 * GIB, ["experts"])),
    ],
)
def test_flags_of_vllm_become_a_policy(flags: dict[str, Any], policy: object) -> None:
    assert read(flags) == EngineOptions(policy)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("own", "budget"),
    [
        ({"device_memory": "20GiB"}, Budget("20GiB", mode="cpu")),
        ({"device_memory": 4096, "batch": 16}, Budget(4096, mode="cpu", workload=Workload([16]))),
        ({"device_memory": 4096, "batch": "1,16"}, Budget(4096, mode="cpu", workload=Workload([1, 16]))),
        (
            {"device_memory": "1GiB", "batch": [1, 16], "params": ["mlp"], "rules": ["a=b=uva", "c=resident"]},
            Budget("1GiB", ["mlp"], "cpu", [("a=b", "uva"), ("c", "resident")], Workload([1, 16])),
        ),
    ],
)
def test_a_budget(own: dict[str, Any], budget: Budget) -> None:
    assert read(own=own) == EngineOptions(budget)


def test_names_narrow_a_budget_and_the_group_rule_wherever_they_are_written() -> None:
    budget = EngineOptions(Budget("1GiB", ["mlp"], "cpu"))
    assert read({"offload_params": {"mlp"}}, {"device_memory": "1GiB"}) == budget
    assert read(own={"device_memory": "1GiB", "params": ["mlp"]}) == budget
    assert read(GROUP, {"params": ["mlp"]}) == EngineOptions(Prefetch(4, 1, 1, ["mlp"]))
    message = r"headrace\.params is given twice: \['a'\] in --additional-config and \['mlp'\]"
    with pytest.raises(OptionError, match=message):
        read({"offload_params": {"mlp"}}, {"device_memory": "1GiB", "params": ["a"]})


def test_the_store_and_the_stalls_go_with_flags_and_with_a_budget() -> None:
    own = {"mode": "shm_cpu", "measure_stalls": True}
    assert read(GROUP, own) == EngineOptions(Prefetch(4, 1, 1, mode="shm_cpu"), "shm_cpu", None, True)
    assert read({"cpu_offload_gb": 1.0}, own) == EngineOptions(UVA(GIB, mode="shm_cpu"), "shm_cpu", None, True)
    budget = Budget("1GiB", mode="shm_cpu")
    assert read(own={**own, "device_memory": "1GiB", "replicas": 4}) == EngineOptions(budget, "shm_cpu", 4, True)


@pytest.mark.parametrize("additional", [{}, {"other": 1}, {"headrace": {}}, SimpleNamespace(), None])
def test_what_is_not_for_headrace_is_left_alone(additional: Any) -> None:
    assert read_options(offload_config(), additional) == EngineOptions(None)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {**GROUP, "cpu_offload_gb": 1.5},
            "--offload-group-size and --cpu-offload-gb contradict each other: each says what is offloaded; leave one "
            "of the two out",
        ),
        # A backend does not settle it: vLLM would ignore the other flags with a warning.
        ({"backend": "uva", **GROUP, "cpu_offload_gb": 1.0}, "--offload-group-size and --cpu-offload-gb contradict"),
        ({"backend": "uva", **GROUP}, "--offload-backend uva needs --cpu-offload-gb, which is not set"),
        ({**GROUP, "offload_prefetch_step": 0}, "--offload-prefetch-step = 0: expected at least 1"),
        (
            {"offload_params": {"mlp"}},
            "--offload-params has no effect without headrace.device_memory or --offload-group-size inside vLLM: add "
            "one of them, or leave --offload-params out",
        ),
        ({"offload_prefetch_step": 2}, "--offload-prefetch-step has no effect without --offload-group-size"),
        ({"cpu_offload_params": {"mlp"}}, "--cpu-offload-params has no effect without --cpu-offload-gb"),
    ],
)
def test_flags_that_contradict_or_have_no_effect(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as caught:
        read(flags)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (GROUP, "headrace.device_memory and --offload-group-size contradict each other"),
        ({"cpu_offload_gb": 2.0}, "leave one of the two out"),
    ],
)
def test_a_budget_and_flags_contradict_each_other(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as caught:
        read(flags, {"device_memory": "1GiB"})
    assert message in str(caught.value)


FORM = """write it like --additional-config '{"headrace": {"device_memory": "20GiB"}}'"""


@pytest.mark.parametrize(("own", "kind", "message"), [
    ([], OptionTypeError, f"headrace: expected an object, found list []; {FORM}"),
    ("20GiB", OptionTypeError, f"headrace: expected an object, found str '20GiB'; {FORM}"),
    ({"device_mem": "1GiB"}, OptionError, "headrace.device_mem is unknown: expected one of device_memory, batch"),
    ({"device_mem": "1GiB"}, OptionError, "did you mean 'device_memory'?"),
    ({"device_memory": "20 Gbit"}, SizeError, "headrace.device_memory: size '20 Gbit' is not a size; write it"),
    ({"device_memory": -1}, SizeError, "headrace.device_memory: size -1: expected more than 0 bytes; write it"),
    ({"device_memory": 1.5}, OptionTypeError, "headrace.device_memory: expected str or int, found float 1.5"),
    ({"device_memory": None}, OptionTypeError, "headrace.device_memory: expected str or int, found NoneType"),
    *(
        ({"device_memory": "1GiB", "batch": wrong}, OptionError, f"headrace.batch = {number}: expected at least 1")
        for wrong, number in ((0, 0), (-1, -1), ([0], 0))
    ),
    *(
        ({"device_memory": "1GiB", "batch": wrong}, OptionTypeError, f"headrace.batch: expected {what}")
        for wrong, what in (
            (1.5, "numbers of rows such as [1, 16, 256], found 1.5"),
            (True, "an int, found bool True"),
            ([], "numbers of rows such as [1, 16, 256], found []"),
            ([1, "16"], "an int, found str '16'"),
            ({"1": 2}, "numbers of rows such as [1, 16, 256], found {'1': 2}"),
            (None, "numbers of rows such as [1, 16, 256], found None"),
        )
    ),
    ({"device_memory": "1GiB", "batch": "1;16"}, OptionError, "headrace.batch '1;16': expected numbers of rows"),
    ({"device_memory": "1GiB", "params": "mlp"}, OptionTypeError, "headrace.params: expected a list of strings"),
    ({"device_memory": "1GiB", "params": [1]}, OptionTypeError, 'such as ["mlp"], found [1]'),
    ({"device_memory": "1GiB", "rules": "a=uva"}, OptionTypeError, "headrace.rules: expected a list of strings"),
    ({"device_memory": "1GiB", "rules": ["mlp"]}, OptionError, "headrace.rules 'mlp': expected a name pattern"),
    ({"device_memory": "1GiB", "rules": ["a=cpu"]}, OptionError, "'=' and a mechanism, found 'cpu'; write"),
    (
        {"device_memory": "1GiB", "rules": ["a=uva", "b=uva", "a=prefetch"]},
        OptionError,
        "rules 'a=uva' and 'a=prefetch' contradict each other: one pattern has one mechanism; leave one of them",
    ),
    ({"mode": "disk"}, OptionError, "headrace.mode 'disk': expected one of cpu, shm_cpu inside vLLM"),
    ({"mode": ["cpu"]}, OptionError, "headrace.mode ['cpu']: expected one of cpu, shm_cpu"),
    ({"replicas": "2"}, OptionTypeError, "headrace.replicas: expected an int, found str '2'"),
    ({"replicas": True}, OptionTypeError, "headrace.replicas: expected an int, found bool True"),
    ({"replicas": 1, "mode": "shm_cpu"}, OptionError, "headrace.replicas = 1: expected at least 2"),
    ({"replicas": 2}, OptionError, "no effect with mode 'cpu': add \"mode\": \"shm_cpu\", or leave it out"),
    ({"measure_stalls": 1}, OptionTypeError, "headrace.measure_stalls: expected true or false, found 1"),
    ({"batch": 1}, OptionError, "headrace.batch has no effect without headrace.device_memory inside vLLM: add it"),
    ({"rules": ["a=uva"]}, OptionError, "headrace.rules has no effect without headrace.device_memory"),
    ({"params": ["a"]}, OptionError, "headrace.params has no effect without headrace.device_memory or --offload"),
    ({"mode": "cpu"}, OptionError, "headrace.mode has no effect without headrace.device_memory, --offload-gro"),
    ({"measure_stalls": True}, OptionError, "headrace.measure_stalls has no effect without headrace.device_me"),
])  # fmt: skip
def test_a_wrong_key_or_value_says_what_to_write(own: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as caught:
        read(own=own)
    assert message in str(caught.value)


def test_the_table_lists_every_key() -> None:
    listed = re.findall(r"^``(\w+)`` ", options.__doc__ or "", re.MULTILINE)
    assert sorted(listed) == sorted(options.KEYS)


# -- versions ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def _as_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "HOOKS", {})


@pytest.mark.usefixtures("_as_expected")
@pytest.mark.parametrize(
    "version", ["0.20.2", "0.20.10", "0.21.0", "0.26.0", "0.33.0+cu130", "0.33.1.dev3+g123", "0.33.7rc1", "0.33"]
)
def test_versions_that_will_do(version: str) -> None:
    require_supported(version)


@pytest.mark.usefixtures("_as_expected")
@pytest.mark.parametrize(
    ("version", "what"),
    [
        ("0.20.1", "vLLM 0.20.1 is too old"),
        ("0.9.2", "vLLM 0.9.2 is too old"),
        ("0.20", "vLLM 0.20 is too old"),
        ("0.34.0", "vLLM 0.34.0 is newer than the tested ones"),
        ("0.34.0.dev1+gabc", "vLLM 0.34.0.dev1+gabc is newer than the tested ones"),
        ("1.0.0", "vLLM 1.0.0 is newer than the tested ones"),
        ("dev", "vLLM calls itself 'dev', which is no version number"),
        ("", "vLLM calls itself '', which is no version number"),
    ],
)
def test_versions_that_will_not(version: str, what: str) -> None:
    with pytest.raises(OptionError) as caught:
        require_supported(version)
    message = str(caught.value)
    assert message.startswith(what)
    assert "expected 0.20.2 to 0.33.x; install one of these (pip install 'vllm==0.33.0')" in message
    assert "leave --worker-cls out" in message


# -- what vLLM has to have; json stands in for a module of it ---------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "difference"),
    [
        (Name("json", "loads", ("s",), mentions=("_default_decoder",)), ""),
        (Name("json.decoder", "JSONDecoder.decode", ("self", "s")), ""),
        (Name("json.gone", "loads"), "json.gone.loads is missing (No module named 'json.gone')"),
        (Name("json", "JSONDecoder.gone"), "json.JSONDecoder.gone is missing"),
        (Name("json", "loads", ("text",)), "json.loads takes (s, cls, object_hook"),
        (Name("json", "loads", mentions=("gone",)), "json.loads no longer uses gone"),
        (Name("json", "load", mentions=("read",)), ""),
        (Name("json", "detect_encoding", mentions=("utf-32",)), ""),
        (Name("json", "detect_encoding", mentions=("utf-64",)), "json.detect_encoding no longer uses utf-64"),
        (Name("json", "gone", since=(0, 27)), ""),
        (Name("json", "gone", since=(0, 26)), "json.gone is missing"),
        (Name("json", "JSONDecoder", fields=("gone",)), "json.JSONDecoder has no field gone"),
        (Name("headrace.config", "Budget", fields=("device_memory", "workload")), ""),
        (Name("headrace.config", "Budget", fields=("rules", "gone")), "headrace.config.Budget has no field gone"),
    ],
)
def test_differences_are_named(name: Name, difference: str) -> None:
    found = differences((name,), "0.26.0")
    if difference:
        assert len(found) == 1
        assert found[0].startswith(difference)
    else:
        assert found == []


@pytest.mark.parametrize(
    ("target", "calls", "difference"),
    [
        ("json.loads", ("gone",), "json.loads no longer uses gone"),
        ("json.gone", (), "json.gone is missing"),
        ("json.gone.loads", (), "json.gone.loads is missing"),
        ("json.JSONDecoder", ("decode",), "json.JSONDecoder no longer uses decode"),
    ],
)
def test_a_vllm_of_the_right_version_without_a_hook_is_refused(
    monkeypatch: pytest.MonkeyPatch, target: str, calls: tuple[str, ...], difference: str
) -> None:
    monkeypatch.setattr(interface, "HOOKS", {"json.loads": ("_default_decoder",), target: calls})
    with pytest.raises(OptionError, match=rf"vLLM 0.26.0 differs from the tested versions: {difference}"):
        require_supported("0.26.0")
