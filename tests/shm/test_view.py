"""shm.view: what a reader may see of a block, when it may see it, and when its lease ends."""

import gc
import threading

import numpy as np
import pytest
import torch

from shm.client import Session, connect
from shm.errors import EncodeFailed, SessionClosed, StaleHandle, WaitTimeout, WorkerLost
from shm.layout import Dtype
from shm.messages import BlockMetadata, Handle, ItemRows
from shm.view import View
from tests.bench.attach_process import AttachServer
from tests.bench.attach_server import Fail, LoseWorker, Publish, Ready, Reclaim, expected_bytes

NUMPY = {Dtype.FLOAT32: np.float32, Dtype.FLOAT16: np.float16, Dtype.BFLOAT16: np.uint16}
TORCH = {Dtype.FLOAT32: torch.float32, Dtype.FLOAT16: torch.float16, Dtype.BFLOAT16: torch.bfloat16}


def ready(server: AttachServer, rows: int = 4, dim: int = 8, dtype: str = "float32", seed: int = 1) -> Handle:
    handle = server.fill(rows, dim, dtype, seed)
    server.tell(Ready(handle), str)
    return handle


@pytest.mark.parametrize("dtype", list(Dtype))
def test_rows_arrive_in_another_process_bit_for_bit(
    server: AttachServer, session: Session, dtype: Dtype
) -> None:
    expected = expected_bytes(3, 5, 64, dtype)
    with session.attach(ready(server, 5, 64, dtype.label, seed=3)) as view:
        assert (view.rows, view.dim, view.dtype, view.nbytes) == (5, 64, dtype, len(expected))
        array, tensor = view.numpy(), view.torch()
        assert (array.shape, array.dtype) == ((5, 64), np.dtype(NUMPY[dtype]))
        assert array.tobytes() == expected
        assert (tensor.shape, tensor.dtype) == ((5, 64), TORCH[dtype])
        assert tensor.contiguous().view(torch.uint8).numpy().tobytes() == expected
        assert view.metadata == BlockMetadata("image", [ItemRows(0, 5, [[1, 5, 1]], 1, 1)])


def test_arrays_are_read_only_and_not_copies(server: AttachServer, session: Session) -> None:
    with session.attach(ready(server)) as view:
        first, second = view.numpy(), view.numpy()
        assert np.shares_memory(first, second)
        assert view.torch().data_ptr() == first.ctypes.data
        with pytest.raises(ValueError, match="read-only"):
            first[0, 0] = 1


def test_while_a_block_is_filling_only_its_final_rows_are_shown(
    server: AttachServer, session: Session
) -> None:
    handle = server.fill(rows=4, dim=8)
    with session.attach(handle) as view:
        assert view.rows_ready == 0
        assert view.numpy().shape == (0, 8)
        assert view.torch().shape == (0, 8)
        server.tell(Publish(handle, 3), str)
        assert view.rows_ready == 3
        assert view.numpy().tobytes() == expected_bytes(1, 3, 8, Dtype.FLOAT32)
        assert view.torch().shape == (3, 8)
        server.tell(Ready(handle), str)
        assert view.rows_ready == 4
        assert view.numpy().shape == (4, 8)


def wait_in_thread(view: View, results: list[object], rows: int | None) -> threading.Thread:
    def wait() -> None:
        try:
            if rows is None:
                view.wait_ready()
            results.append(view.wait_rows(view.rows if rows is None else rows))
        except Exception as error:  # noqa: BLE001 - the edge of the thread: the test looks at it
            results.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_a_waiter_wakes_when_its_rows_are_there(server: AttachServer, session: Session) -> None:
    handle = server.fill(rows=4, publish=1)
    with session.attach(handle) as view:
        assert view.wait_rows(1, timeout=0) == 1
        results: list[object] = []
        thread = wait_in_thread(view, results, rows=3)
        for rows in (2, 3):
            server.tell(Publish(handle, rows), str)
        thread.join()
        assert results == [3]
        thread = wait_in_thread(view, results, rows=None)
        server.tell(Ready(handle), str)
        thread.join()
        assert results == [3, 4]
        assert view.wait_rows(4) == 4
        view.wait_ready(timeout=0)


def test_a_waiter_gives_up_at_its_timeout(server: AttachServer, session: Session) -> None:
    with session.attach(server.fill(rows=4, publish=2)) as view:
        with pytest.raises(WaitTimeout, match="2 of 4 rows"):
            view.wait_rows(3, timeout=0.01)
        with pytest.raises(WaitTimeout):
            view.wait_ready(timeout=0)
        with pytest.raises(ValueError, match="5 rows of 4"):
            view.wait_rows(5)


def test_a_failed_encode_wakes_its_waiters_and_shows_nothing_more(
    server: AttachServer, session: Session
) -> None:
    handle = server.fill(rows=4, publish=2)
    with session.attach(handle) as view:
        results: list[object] = []
        thread = wait_in_thread(view, results, rows=4)
        server.tell(Fail(handle), str)
        thread.join()
        assert isinstance(results[0], EncodeFailed)
        for access in (view.numpy, view.torch, view.check, view.wait_ready):
            with pytest.raises(EncodeFailed):
                access()


def test_a_dead_worker_wakes_its_waiters_and_is_told_from_a_failed_encode(
    server: AttachServer, session: Session
) -> None:
    finished, handle = ready(server, seed=9), server.fill(rows=4)
    with session.attach(finished) as kept, session.attach(handle) as view:
        results: list[object] = []
        thread = wait_in_thread(view, results, rows=None)
        server.tell(LoseWorker(abandon=False), str)
        thread.join()
        assert isinstance(results[0], WorkerLost)
        with pytest.raises(WorkerLost):
            view.check()
        kept.check()
        assert kept.numpy().tobytes() == expected_bytes(9, 4, 8, Dtype.FLOAT32)


def test_a_dead_daemon_ends_a_wait_without_a_timeout(server: AttachServer, session: Session) -> None:
    with session.attach(server.fill(rows=4)) as view:
        results: list[object] = []
        thread = wait_in_thread(view, results, rows=None)
        server.kill()
        thread.join()
        assert isinstance(results[0], SessionClosed)


def test_after_release_every_access_is_stale_and_the_lease_has_ended(
    server: AttachServer, session: Session
) -> None:
    view = session.attach(ready(server))
    assert view.metadata.modality == "image"
    server.await_leases(1)
    view.release()
    view.release()
    server.await_leases(0)
    assert view.released
    for access in (
        view.numpy,
        view.torch,
        view.check,
        view.wait_ready,
        lambda: view.rows_ready,
        lambda: view.metadata,
    ):
        with pytest.raises(StaleHandle):
            access()
    assert "released" in repr(view)


def test_a_lease_lives_as_long_as_the_last_array_or_tensor(server: AttachServer, session: Session) -> None:
    first, second = session.attach(ready(server)), session.attach(ready(server, seed=2))
    column = first.numpy()[:, 1:3].T
    tensor = second.torch()[1:]
    del first, second
    gc.collect()
    server.await_leases(2)
    assert session.statistics().leases == 2
    del column
    server.await_leases(1)
    del tensor
    server.await_leases(0)
    assert session.statistics().leases == 0


def test_check_tells_that_a_block_went_to_another_request(server: AttachServer, session: Session) -> None:
    handle = ready(server)
    with session.attach(handle) as view:
        copy = view.numpy().copy()
        view.check()
        assert server.tell(Reclaim(handle), bool)  # a daemon that breaks its promise: the lease lives
        with pytest.raises(StaleHandle):
            view.check()
        reused = server.fill(seed=5)
        assert reused.block == handle.block
        with pytest.raises(StaleHandle, match="another request"):
            view.check()
        assert copy.tobytes() == expected_bytes(1, 4, 8, Dtype.FLOAT32)


def test_arrays_stay_mapped_after_their_session_is_closed(server: AttachServer) -> None:
    with connect(server.path) as session:
        view = session.attach(ready(server))
        array, tensor = view.numpy(), view.torch()
    server.await_leases(0)
    assert view.released
    assert array.tobytes() == expected_bytes(1, 4, 8, Dtype.FLOAT32)
    assert float(tensor[0, 1]) == float(array[0, 1])
    with pytest.raises(StaleHandle):
        view.check()
