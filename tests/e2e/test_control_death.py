"""kill -9 of the control plane, and of everything: readers keep what they mapped, nothing else stays."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from shm.client import connect
from shm.errors import SessionClosed, ShmError
from tests.e2e.conftest import STUB
from tests.e2e.daemon import Daemon, open_pidfd, wait_end
from tests.e2e.stub_items import check_rows, expected_rows, stub_item


def test_after_a_kill_of_the_control_plane_workers_end_and_a_readers_mapping_stays(tmp_path: Path) -> None:
    item, late = stub_item(rows=700), stub_item()
    with Daemon(".", *STUB) as daemon:
        workers = [open_pidfd(pid) for pid in daemon.worker_pids()]
        assert len(workers) == 2
        with connect(daemon.attach_socket) as session:
            late_handle = daemon.http.encode(late).handle
            view = session.attach(daemon.http.encode(item).handle)
            daemon.kill()
            for pidfd in workers:
                assert pidfd is not None
                wait_end(pidfd)
            daemon.check_nothing_left()
            assert np.array_equal(view.numpy(), expected_rows(item))
            with pytest.raises(ShmError):
                session.attach(late_handle)
            view.release()
        with Daemon(".", *STUB, directory=daemon.directory) as successor:
            with connect(successor.attach_socket) as session:
                with pytest.raises(ShmError):
                    session.attach(late_handle)  # another boot: never another request's rows
                check_rows(session, successor.http.encode(late).handle, late)
            successor.stop()
        daemon.discard()


def test_a_session_of_a_dead_daemon_says_so() -> None:
    with Daemon(".", *STUB, workers=1) as daemon, connect(daemon.attach_socket) as session:
        handle = daemon.http.encode(stub_item()).handle
        daemon.kill()
        with pytest.raises(SessionClosed):
            session.attach(handle)
        daemon.discard()


def test_a_kill_of_every_process_at_once_leaves_nothing(tmp_path: Path) -> None:
    with Daemon(".", *STUB) as daemon:
        for _ in range(20):
            assert daemon.http.encode(stub_item()).status == 200
        pids = [daemon.process.pid, *daemon.worker_pids()]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        daemon.kill()
        daemon.check_nothing_left()
        daemon.discard()
