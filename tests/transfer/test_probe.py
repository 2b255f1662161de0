"""The kept probe: a reader finds a whole one or none; a file that is no probe is named and ignored."""

from __future__ import annotations

import errno
import json
import os
import pwd
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import headrace
from checks import raising
from headrace.cli import app
from headrace.errors import HeadraceWarning, OptionError
from headrace.plan.nominal_rates import NOMINAL_CPU, NOMINAL_GPU
from headrace.transfer import machine_probe, measuring
from headrace.transfer.machine_probe import Probe, load, load_shared_link, planning_rates, save, save_shared_link
from models import Stack

CPU = torch.device("cpu")
NUM_MUTATIONS = 230


def measured() -> Probe:
    """A probe of this machine, as if it had been measured."""
    return Probe(
        machine_probe.describe_machine(),
        product_s_per_byte={1: 5e-11, 16: 6e-11, 256: 5e-10},
        disk_read_bytes_per_s=2e9,
        cached_read_bytes_per_s=8e9,
    )


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the probe of this machine would be kept; its folder is there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = machine_probe.cache_path()
    assert path is not None
    path.parent.mkdir()
    return path


def require_ignored(place: Path) -> str:
    """The one warning about what lies at ``place``; a budget is planned with nominal rates."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            assert planning_rates(CPU) is NOMINAL_CPU
    (warning,) = said
    assert warning.category is HeadraceWarning
    message = str(warning.message)
    assert message.startswith(f"{place}: expected the kept probe of this machine, found: ")
    assert "`headrace probe` has measured again, or the file is deleted" in message
    return message


# -- keeping -----------------------------------------------------------------------------------------------------------


def test_what_is_saved_is_loaded(place: Path) -> None:
    assert load() is None
    assert save(measured()) == place
    assert load() == measured()
    assert planning_rates(CPU).is_measured
    assert [file.name for file in place.parent.iterdir()] == [place.name]


def test_a_reader_finds_the_old_probe_until_the_new_one_is_whole(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(measured())
    real, seen = Path.replace, []

    def looking(draft: Path, target: Path) -> Path:
        seen.append(load())
        return real(draft, target)

    def failing(fd: int) -> None:
        os.ftruncate(fd, 100)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", looking)
        save(measured())
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing)
        with pytest.raises(OptionError, match="No space left on device; make room for it"):
            save(measured())
    assert [*seen, load()] == [measured(), measured()]
    assert [file.name for file in place.parent.iterdir()] == [place.name]


def test_the_command_prints_what_it_cannot_keep(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "measure", lambda folder: measured())
    assert f"saved in {place}" in CliRunner().invoke(app, ["probe"]).stderr
    place.unlink()
    place.mkdir()
    for flags in ([], ["--json"]):
        result = CliRunner().invoke(app, ["probe", *flags])
        assert result.exit_code == 0
        assert "product" in result.stdout
        assert f"{place}: the probe cannot be kept there: Is a directory; " in " ".join(result.stderr.split())


def test_what_only_earlier_versions_measured_is_ignored(place: Path) -> None:
    place.write_text(json.dumps({**measured().to_json(), "matmul_flops_per_s": 8e14}))
    assert load() == measured()


# -- links of several ranks --------------------------------------------------------------------------------------------


def test_links_are_kept_by_the_number_of_ranks(place: Path) -> None:
    link = {1 << 20: 3e10, 1 << 28: 4e10}
    kept = save_shared_link(2, link)
    assert load_shared_link(2) == link
    assert load_shared_link(4) is None
    assert load() is None, "they are no probe"
    for damage in (
        "", "[]", "{}", kept.read_text().replace("4", "x"), kept.read_text().replace('"torch": "', '"torch": "0'),
    ):  # fmt: skip
        kept.write_text(damage)
        with pytest.warns(HeadraceWarning, match=rf"{kept}: expected the rates of 2 links.*measured again"):
            assert load_shared_link(2) is None
        measuring_again = save_shared_link(2, link)
        assert load_shared_link(2) == link
        assert measuring_again == kept


def test_links_that_others_use_make_nothing_faster() -> None:
    for factor in (0.5, 1.0, 2.0):
        link = {size: factor * NOMINAL_GPU.copy_bytes_per_s(size) for size in measuring.COPY_SIZES}
        rates = measuring.slowed(NOMINAL_GPU, link, 2)
        assert dict(rates.copy_bytes_per_s.points) == link
        for rows in (1, 64, 4096):
            for name in ("in_place_s_per_byte", "in_place_grouped_s_per_byte"):
                expected = getattr(NOMINAL_GPU, name)(rows) * max(1.0, 1 / factor)
                assert getattr(rates, name)(rows) == pytest.approx(expected)
            assert rates.product_s_per_byte(rows) == NOMINAL_GPU.product_s_per_byte(rows)


def test_a_link_is_measured_at_every_size_among_all() -> None:
    met = []
    rates = measuring.link_rates(CPU, lambda: met.append(None), (1 << 20, 1 << 22), 0.01)
    assert list(rates) == [1 << 20, 1 << 22]
    assert min(rates.values()) > 0
    assert len(met) == 2


# -- files that are no probe -------------------------------------------------------------------------------------------


def mutated(rng: random.Random) -> bytes:
    """The file of a probe with one thing wrong."""
    data = measured().to_json()
    whole = json.dumps(data).encode()
    kind = rng.randrange(7)
    if kind == 0:
        return whole[: rng.randrange(len(whole))]
    if kind == 1:  # not UTF-8
        at = rng.randrange(len(whole))
        return whole[:at] + bytes([rng.choice((0xFF, 0xC0, 0x80))]) + whole[at:]
    if kind == 2:  # not JSON, or something else in JSON
        return rng.choice((b"", b"probe", b"[]", b"null", b"3", b'"text"', b"[" * 100_000, b"{}", b"\0" * 64))
    if kind == 3:
        data.pop(rng.choice(("schema", "machine", "product_s_per_byte", "cached_read_bytes_per_s")))
        return json.dumps(data).encode()
    if kind == 4:
        data[rng.choice(("schema", "machine"))] = rng.choice((1, 2, None, True, "3", [3], {}, {"cpu": 3}))
        return json.dumps(data).encode()
    return json.dumps(_with_wrong_number(data, rng)).encode()


def _with_wrong_number(data: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    wrong = rng.choice((float("nan"), float("inf"), -float("inf"), -1.0, 0, 1e300, 1e-300, 10**400, "5e-11", True, [1]))
    name = rng.choice([key for key in data if key not in ("schema", "machine")])
    if not isinstance(data[name], dict):
        data[name] = wrong
    elif rng.random() < 0.5:
        data[name] = {**data[name], "16": wrong}
    else:
        data[name] = rng.choice(({"x": 1.0}, {"-4": 1.0}, {"0": 1.0}, {"1.5": 1.0}, {"9" * 400: 1.0}, [1.0], "fast", 1))
    return data


@pytest.mark.parametrize("seed", range(NUM_MUTATIONS))
def test_a_damaged_file_is_named_and_ignored(place: Path, seed: int) -> None:
    content = mutated(random.Random(seed))
    place.write_bytes(content)
    require_ignored(place)
    with pytest.raises(OptionError, match="expected what `headrace probe --json` of this version printed"):
        machine_probe.read_probe(place)
    save(measured())
    assert load() == measured()


@pytest.mark.slow
def test_what_is_measured_on_a_disk_leaves_nothing_to_a_killed_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []
    read_rate = measuring._read_rate

    def watched(*args: Any) -> float | None:
        seen.append(os.listdir(tmp_path))
        return read_rate(*args)

    monkeypatch.setattr(measuring, "_read_rate", watched)
    rates = measuring._disk(tmp_path, 32 << 20)
    assert rates["cached_read_bytes_per_s"]
    assert seen == [[], [], []]


def test_a_disk_without_room_for_what_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", raising(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    with pytest.raises(OptionError, match=rf"folder '{tmp_path}': expected room for a file of .* No space left"):
        measuring.measure(tmp_path, 16 << 20)


def test_the_probe_of_another_machine_under_this_ones_name(place: Path) -> None:
    place.write_text(json.dumps(Probe({**machine_probe.describe_machine(), "host": "x"}, **_rates()).to_json()))
    assert "found: the probe of another machine" in require_ignored(place)


def _rates() -> dict[str, Any]:
    return {name: getattr(measured(), name) for name in ("product_s_per_byte", "cached_read_bytes_per_s")}


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (os.mkfifo, "no regular file"),
        (os.mkdir, "Is a directory"),
        (lambda path: path.symlink_to("/dev/zero"), "no regular file"),
        (lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
        (lambda path: path.write_bytes(b" " * 2**21), "more than 1048576 bytes"),
    ],
    ids=["fifo", "folder", "device", "loop", "too long"],
)
def test_what_is_no_file_is_not_waited_for(place: Path, make: Callable[[Path], object], found: str) -> None:
    make(place)
    assert f"found: {found}" in require_ignored(place)


def test_a_file_that_may_not_be_read(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(measured())
    real = os.open

    def refusing(path: Any, *args: Any, **kwargs: Any) -> int:
        if str(path) == str(place):  # nothing is closed to root
            raise PermissionError(13, "Permission denied")
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refusing)
    assert "found: Permission denied" in require_ignored(place)


# -- no home -----------------------------------------------------------------------------------------------------------


def test_a_relative_cache_folder_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It would be another one in each working directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert machine_probe.cache_path().is_relative_to(tmp_path / ".cache")


def test_budgets_work_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs with a bare user id."""
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", raising(KeyError("getpwuid(): uid not found")))
    assert machine_probe.cache_path() is None
    assert planning_rates(CPU) is NOMINAL_CPU
    model = Stack(4, 256).eval()
    resident = sum(parameter.nbytes for parameter in model.parameters())
    with headrace.offload(model, resident // 2) as handle:
        assert handle.plan.offloaded_bytes
    with pytest.raises(OptionError, match=r"has no home folder .*; set XDG_CACHE_HOME"):
        save(measured())
    result = CliRunner().invoke(app, ["plan", "~/model"])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: MODEL '~/model': user ")
