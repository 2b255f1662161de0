"""The promise: what goes wrong in one rank of a shared offload, whenever it does, is an error in all of them at once.

And the next offload works, in a new group.
"""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import headrace
from headrace.adapters.transformers import load
from headrace.errors import LimitError, PeerError
from models import all_layers, rows, save
from shm_models import SHARED, build, expected, mappings, offload, on_meta
from shm_ranks import ranks

# Who is not told waits ten minutes; a machine that is busy with other things takes its time for imports alone.
AT_ONCE_S = 40.0
MODES: dict[str, dict[str, Any]] = {
    "shm_cpu": {"policy": SHARED},
    "sharded_gpu": {"policy": all_layers(2, "sharded_gpu")},
    "sharded_cpu": {"policy": all_layers(2, "sharded_cpu")},
}


def fail_planned(*args: object) -> None:
    raise LimitError("planted", "free host memory", 2, 1)


def interrupt(*args: object) -> None:
    raise KeyboardInterrupt


# How the call of the rank that fails differs, and what stands in for parts of headrace there.
MISTAKES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("CheckpointError: /no/such", {"checkpoint": "/no/such/folder"}, {}),
    ("OptionTypeError: model", {"model": "a model"}, {}),
    ("SizeError", {"policy": "lots"}, {}),
    ("LimitError: planted", {}, {"headrace.planning.context.check_limits": fail_planned}),
    ("KeyboardInterrupt", {}, {"headrace.runtime.prepare.take_inventory": interrupt}),
    # After the store was filled: the others have read everything, and undo that.
    ("LimitError: planted", {}, {"headrace.runtime.session.OffloadSession._attach_units": fail_planned}),
]
# While the others wait at a connection, and before there is the second one.
SPLIT_MISTAKES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("LimitError: planted", {}, {"headrace.stores.rank_stores._allocate": fail_planned}),
    ("LimitError: planted", {}, {"headrace.transfer.sharded_copy.open_link": fail_planned}),
]


def make_mistakes(rank: int, talk: Connection, folder: str, options: dict[str, Any], mistakes: Any) -> Any:
    """Each mistake in one rank, and after each the same call without one in a new group."""
    found = []
    for index, (told, wrong, stand_ins) in enumerate(mistakes):
        guilty = index % dist.get_world_size()
        model, group = on_meta(), dist.new_group()
        right = {"model": model, "checkpoint": folder, "group": group, **options}
        begin = time.monotonic()
        with pytest.MonkeyPatch.context() as patch, pytest.raises(BaseException) as caught:  # noqa: PT011, PT012
            if rank == guilty:
                for name, stand_in in stand_ins.items():
                    patch.setattr(name, stand_in)
            headrace.offload(**{**right, **(wrong if rank == guilty else {})})
        seconds, error = time.monotonic() - begin, f"{type(caught.value).__name__}: {caught.value}"
        del caught
        untouched = all(p.is_meta for p in model.parameters()) and mappings() == []
        with pytest.raises(PeerError, match="To try again, make a new group on all ranks"):
            headrace.offload(**right)
        with headrace.offload(**{**right, "group": dist.new_group()}):
            found.append((told, guilty, error, seconds, untouched, torch.equal(model(rows()), expected())))
    return found


@pytest.mark.parametrize("mode", list(MODES))
def test_an_error_in_one_rank_is_one_in_all_at_once_and_a_new_group_works(mode: str, tmp_path: Path) -> None:
    folder = str(save(build(), tmp_path))
    mistakes = MISTAKES if mode == "shm_cpu" else [*MISTAKES, *SPLIT_MISTAKES]
    with ranks(3, tmp_path, make_mistakes, folder, MODES[mode], mistakes, tcp=mode == "sharded_cpu") as group:
        for rank, found in enumerate([one.hear() for one in group]):
            assert len(found) == len(mistakes), found
            for told, guilty, error, seconds, untouched, right in found:
                if rank == guilty:
                    assert error.startswith(told), (told, error)
                else:
                    assert error.startswith(f"PeerError: rank {guilty} gave up a shared offload"), error
                    assert told in error
                assert seconds < AT_ONCE_S
                assert untouched
                assert right


def fail_in_one_group(rank: int, talk: Connection) -> list[bool]:
    """A failure in one group, between calls of another one."""
    groups = [dist.group.WORLD, dist.new_group()]
    models, found = [build(1), build(2)], []
    for step in range(6):
        group, model = groups[step % 2], models[(step // 2) % 2]
        try:
            headrace.offload(model, "lots" if step == 1 and rank == 0 else SHARED, group=group).remove()
        except headrace.HeadraceError:
            found.append(step % 2 == 1)
        else:
            found.append(step % 2 == 0)
    return [*found, *(torch.equal(m(rows()), expected(seed)) for seed, m in enumerate(models, 1))]


def test_a_failure_in_one_group_is_none_in_another(tmp_path: Path) -> None:
    with ranks(2, tmp_path, fail_in_one_group) as group:
        assert [rank.hear() for rank in group] == [[True] * 8] * 2


def other_mode(rank: int, talk: Connection, modes: list[str]) -> Any:
    model = build()
    try:
        offload(model, all_layers(2, modes[rank]))
    except headrace.HeadraceError as error:
        return type(error).__name__, str(error), torch.equal(model(rows()), expected())


@pytest.mark.parametrize("modes", [["shm_cpu", "cpu"], ["sharded_gpu", "shm_cpu"]])
def test_another_mode_is_named_in_all_ranks_at_once(modes: list[str], tmp_path: Path) -> None:
    with ranks(2, tmp_path, other_mode, modes) as group:
        for rank, (kind, message, untouched) in enumerate(one.hear(AT_ONCE_S) for one in group):
            assert kind == "OptionError"
            assert f"mode: {modes[rank]} here, {modes[1 - rank]} there" in message
            assert untouched


def own_weights(rank: int, talk: Connection) -> Any:
    """A mode that is each process's own: the group has no effect, and ranks may hold other weights."""
    model = build(rank)
    with pytest.warns(headrace.HeadraceWarning, match="group=... has no effect"), offload(model, all_layers(2, "cpu")):
        return torch.equal(model(rows()), expected(rank))


def test_ranks_whose_group_has_no_effect_need_not_agree(tmp_path: Path) -> None:
    with ranks(2, tmp_path, own_weights) as group:
        assert [rank.hear() for rank in group] == [True, True]


def die_while_planning(rank: int, talk: Connection, when: str) -> Any:
    if when == "later":
        offload(build()).remove()
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    elif rank == 1:
        vars(headrace.runtime.prepare)["take_inventory"] = lambda model: os.kill(os.getpid(), signal.SIGKILL)
    try:
        offload(build())
    except headrace.HeadraceError as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize("when", ["first", "later"])
def test_a_rank_killed_before_it_has_met_the_others_is_noticed(when: str, tmp_path: Path) -> None:
    """Also one that has taken part before, and not begun yet this time."""
    with ranks(2, tmp_path, die_while_planning, when) as (first, second):
        assert second.join() == -signal.SIGKILL
        kind, message = first.hear(AT_ONCE_S)
        assert kind == "PeerError"
        assert "rank 1 has ended, and a shared offload needs every rank of its group" in message


def load_another_folder(rank: int, talk: Connection, folder: str) -> Any:
    """Before anything of headrace.offload is called."""
    begin = time.monotonic()
    try:
        load(folder if rank == 0 else f"{folder}/none", SHARED, group=dist.group.WORLD)
    except headrace.HeadraceError as caught:
        error, seconds = f"{type(caught).__name__}: {caught}", time.monotonic() - begin
    model, handle = load(folder, SHARED, group=dist.new_group())
    with handle:
        whole = model(torch.tensor([[1, 2, 3]])).logits
    return error, seconds, torch.equal(whole, model(torch.tensor([[1, 2, 3]])).logits)


def test_a_wrong_folder_in_one_rank_of_a_load(tmp_path: Path) -> None:
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=5, num_attention_heads=2, vocab_size=99
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    with ranks(2, tmp_path, load_another_folder, str(tmp_path)) as group:
        for rank, (error, seconds, right) in enumerate(one.hear() for one in group):
            assert error.startswith("CheckpointError" if rank else "PeerError: rank 1 gave up a shared offload"), error
            assert "no such folder" in error
            assert seconds < AT_ONCE_S
            assert right
