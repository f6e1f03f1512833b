"""What goes into the next forward."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from gpu_workers.batching import next_batch


@dataclass(frozen=True)
class Waiting:
    """The least that batching needs to know."""

    order: tuple[int, int, int]
    cost_patches: int = 1
    batch_key: str = "image"
    job_key: int = 0
    job_share: int = 1 << 20


def waiting(number: int, cost_patches: int = 1, batch_key: str = "image") -> Waiting:
    return Waiting((number, number, 0), cost_patches, batch_key)


def test_nothing_waiting_is_an_empty_batch() -> None:
    assert next_batch([], 8, 100) == []


def test_the_oldest_go_first_up_to_the_item_limit() -> None:
    items = [waiting(3), waiting(1), waiting(2)]
    assert next_batch(items, 2, 100) == [waiting(1), waiting(2)]


def test_items_are_taken_while_their_patches_fit() -> None:
    items = [waiting(1, 60), waiting(2, 40), waiting(3, 1)]
    assert next_batch(items, 8, 100) == items[:2]


def test_a_smaller_item_behind_one_that_does_not_fit_is_taken() -> None:
    items = [waiting(1, 60), waiting(2, 50), waiting(3, 40)]
    assert next_batch(items, 8, 100) == [items[0], items[2]]


def test_an_item_larger_than_the_limit_goes_alone_when_it_is_the_oldest() -> None:
    items = [waiting(1, 500), waiting(2, 1)]
    assert next_batch(items, 8, 100) == items[:1]


def test_a_huge_item_does_not_hold_up_older_small_ones() -> None:
    items = [waiting(1, 1), waiting(2, 500), waiting(3, 1)]
    assert next_batch(items, 8, 100) == [items[0], items[2]]


def test_items_of_different_keys_never_share_a_batch() -> None:
    items = [waiting(1, batch_key="video"), waiting(2), waiting(3, batch_key="video")]
    assert next_batch(items, 8, 100) == [items[0], items[2]]


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 300), st.sampled_from(["image", "audio"]))),
    st.integers(1, 10),
    st.integers(1, 200),
)
def test_every_batch_has_the_oldest_and_keeps_the_limits(
    specs: list[tuple[int, int, str]], max_items: int, max_patches: int
) -> None:
    items = [Waiting((deadline, n, 0), cost, key) for n, (deadline, cost, key) in enumerate(specs)]
    batch = next_batch(items, max_items, max_patches)
    assert bool(batch) == bool(items)
    if batch:
        assert batch[0] == min(items, key=lambda item: item.order)
        assert batch == sorted(batch, key=lambda item: item.order)
        assert len({item.batch_key for item in batch}) == 1
        assert len(batch) <= max_items
        assert len(batch) == 1 or sum(item.cost_patches for item in batch) <= max_patches


def streamed(job: int, number: int, share: int) -> Waiting:
    return Waiting((job, job, number), job_key=job, job_share=share)


def test_a_job_whose_first_rows_are_waited_for_keeps_to_its_share() -> None:
    items = [streamed(1, number, 2) for number in range(16)]
    assert next_batch(items, 8, 100) == items[:2]


def test_what_a_share_leaves_free_is_for_other_jobs() -> None:
    first = [streamed(1, number, 1) for number in range(16)]
    others = [waiting(2 + number) for number in range(4)]
    assert next_batch(first + others, 4, 100) == [first[0], *others[:3]]
