"""The promise: requests start in order, each when its full length fits the cache, in a batch of its kind."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.serving.admission import Admission, Pool
from headrace.serving.request_body import RequestError


def admission(sequences: int = 2, longest: int = 64, max_waiting: int = 3) -> Admission[str]:
    return Admission(Pool.of(sequences, longest, 16), max_waiting)


def test_a_pool_holds_so_many_of_the_longest() -> None:
    pool = Pool.of(3, 50, 16)
    assert (pool.num_blocks, pool.num_tokens, pool.blocks_of(16), pool.blocks_of(17)) == (12, 192, 1, 2)


def test_what_can_never_fit_is_a_mistake_of_the_request() -> None:
    queue = admission()
    with pytest.raises(RequestError, match=r"more than the 64 that a sequence may have here .* 44 or less") as caught:
        queue.enter("a", 20, 45, "greedy")
    assert caught.value.status == 400
    with pytest.raises(RequestError, match="send a shorter prompt"):
        queue.enter("a", 64, 1, "greedy")
    queue.enter("a", 20, 44, "greedy")
    assert queue.start() == ["a"]


def test_a_full_queue_is_not() -> None:
    queue = admission()
    for name in "abc":
        queue.enter(name, 20, 44, "greedy")
    with pytest.raises(RequestError, match=r"0 requests run and 3 wait, the limit of --max-queue; try again") as caught:
        queue.enter("d", 1, 1, "greedy")
    assert caught.value.status == 429
    assert queue.start() == ["a", "b"]
    queue.enter("d", 1, 1, "greedy")


def test_shorter_ones_are_more() -> None:
    queue = admission(max_waiting=99)
    for index in range(9):
        queue.enter(str(index), 8, 8, "greedy")
    assert queue.start() == [str(index) for index in range(8)]
    assert (queue.running, queue.waiting, queue.reserved_tokens) == (8, 1, 128)
    queue.leave("3")
    queue.leave("3")
    assert queue.start() == ["8"]


def test_another_batch_begins_when_the_one_before_has_ended() -> None:
    queue = admission()
    queue.enter("a", 8, 8, "greedy")
    assert queue.start() == ["a"]
    queue.enter("b", 8, 8, "hot")
    queue.enter("c", 8, 8, "greedy")  # would fit, and would keep b waiting
    assert queue.start() == []
    queue.leave("a")
    assert queue.start() == ["b"]
    queue.leave("b")
    assert queue.start() == ["c"]


REQUESTS = st.lists(
    st.tuples(st.integers(1, 64), st.integers(1, 64), st.sampled_from("xy"), st.booleans()), max_size=30
)


@settings(deadline=None)
@given(REQUESTS, st.integers(1, 4), st.integers(1, 5), st.randoms(use_true_random=False))
def test_whatever_comes_and_goes(
    requests: list[tuple[int, int, str, bool]], sequences: int, max_waiting: int, random: object
) -> None:
    """The cache is never overbooked, a batch has one kind, order is kept, and everything gets its turn."""
    queue = admission(sequences, 64, max_waiting)
    kinds: dict[str, str] = {}
    blocks: dict[str, int] = {}
    running: list[str] = []
    order: list[str] = []
    started: list[str] = []

    def step() -> None:
        for name in queue.start():
            started.append(name)
            running.append(name)
        assert sum(blocks[name] for name in running) <= queue.pool.num_blocks
        assert len({kinds[name] for name in running}) <= 1
        assert queue.reserved_tokens == 16 * sum(blocks[name] for name in running)
        assert queue.running == len(running)

    def end() -> None:
        name = running.pop(random.randrange(len(running)))  # type: ignore[attr-defined]
        queue.leave(name)

    for index, (prompt, answer, kind, ends_one) in enumerate(requests):
        name = str(index)
        expected = 400 if prompt + answer > 64 else 429 if queue.waiting == max_waiting else None
        if expected is not None:
            with pytest.raises(RequestError) as caught:
                queue.enter(name, prompt, answer, kind)
            assert caught.value.status == expected
            continue
        queue.enter(name, prompt, answer, kind)
        kinds[name], blocks[name] = kind, -(-(prompt + answer) // 16)
        order.append(name)
        step()
        if ends_one and running:
            end()
            step()
    while running:
        end()
        step()
    assert started == order
    assert (queue.running, queue.waiting, queue.reserved_tokens) == (0, 0, 0)
