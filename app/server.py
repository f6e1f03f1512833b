"""The daemon from its sockets to its exit status. Called by `app.cli`.

Order: sockets are bound, then answers begin (/livez at once), then the engine loads workers. The way back:
readyz says no, new work is refused, work under way is finished up to a limit, the engine stops. systemd is
told at its beginning how long that takes at worst.
"""

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

import msgspec
import uvloop

from app.admission import Admission
from app.application import create_application
from app.config import ServeConfig
from app.engine import Engine
from app.errors import ConfigError
from app.fetch import MediaFetcher
from app.ingest import Ingest
from app.listener import CLOSE_TIMEOUT_S, Listener, bind_tcp, unix_listener
from app.notify import Notifier, Systemd
from app.place import STOP_GRACE_S
from app.services import Services

READY_POLL_S: Final = 0.1
START_EXTENSION_S: Final = 30.0
ANSWER_GRACE_S: Final = 5.0
STOP_MARGIN_S: Final = 1.0
EXIT_SECOND_SIGNAL: Final = 130

log = logging.getLogger("encoderd")


def run(config: ServeConfig, systemd: Systemd) -> None:
    """Serve until a signal. ConfigError and shm.errors.RegionUnavailable are the caller's to report."""
    if systemd.watchdog_s and systemd.watchdog_s <= 2 * config.heartbeat_s:
        raise ConfigError(
            f"WatchdogSec ({systemd.watchdog_s:g} s) must be longer than twice the heartbeat "
            f"({config.heartbeat_s:g} s)"
        )
    with (
        open_sockets(config, systemd) as (sockets, bound_config),
        Notifier(systemd.notify_socket) as notifier,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(_serve(bound_config, sockets, notifier, systemd.watchdog_s))


@contextmanager
def open_sockets(config: ServeConfig, systemd: Systemd) -> Iterator[tuple[list[socket.socket], ServeConfig]]:
    """Inherited sockets if there are any, else --host/--port and --uds; and the config as it was bound."""
    with ExitStack() as closing:
        sockets = list(systemd.http_sockets)
        if not sockets:
            sockets.append(bind_tcp(config.host, config.port))
            if config.uds:
                sockets.append(closing.enter_context(unix_listener(config.uds)))
        for bound in sockets:
            closing.callback(bound.close)
            config = _with_address(config, bound)
        if systemd.attach_socket is not None:
            path = systemd.attach_socket.getsockname()
            descriptor = systemd.attach_socket.detach()
            config = msgspec.structs.replace(config, attach_socket=path, attach_fd=descriptor)
        yield sockets, config


def _with_address(config: ServeConfig, bound: socket.socket) -> ServeConfig:
    name = bound.getsockname()
    if bound.family == socket.AF_UNIX:
        return msgspec.structs.replace(config, uds=name)
    return msgspec.structs.replace(config, host=name[0], port=name[1])


async def _serve(
    config: ServeConfig, sockets: list[socket.socket], notifier: Notifier, watchdog_s: float
) -> None:
    stop = _stop_on_signals()
    async with MediaFetcher(config) as fetcher:
        services = Services(config, Ingest(config, fetcher))
        with services.loop_monitor:
            async with Listener(create_application(services), config, sockets):
                log.info("listening on %s", ", ".join(_addresses(sockets)))
                async with Engine(config, services.admission) as engine:
                    services.engine_started(engine)
                    failure = await _until_stopped(engine, notifier, watchdog_s, stop)
                    notifier.stopping(longest_stop_s(config))
                    await _drain(services.admission, engine, config)
    if failure:
        raise ConfigError(f"no worker can start: {failure}")
    log.info("stopped")


async def _until_stopped(engine: Engine, notifier: Notifier, watchdog_s: float, stop: asyncio.Event) -> str:
    """Returns at the first signal, or with the reason once every worker has failed for good."""
    async with asyncio.TaskGroup() as group:
        stopped = group.create_task(stop.wait())
        failed = group.create_task(engine.failed())
        reporters = [
            group.create_task(_report_start(engine, notifier)),
            group.create_task(_feed_watchdog(engine, notifier, watchdog_s)),
        ]
        await asyncio.wait((stopped, failed), return_when=asyncio.FIRST_COMPLETED)
        failure = failed.result() if failed.done() else ""
        for task in (stopped, failed, *reporters):
            task.cancel()
    return failure


def _stop_on_signals() -> asyncio.Event:
    """Set by the first SIGTERM or SIGINT. The second ends the process at once: children die with it, and
    shared memory has no names to clean up."""
    stop = asyncio.Event()

    def signalled() -> None:
        if stop.is_set():
            os._exit(EXIT_SECOND_SIGNAL)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled)
    return stop


async def _report_start(engine: Engine, notifier: Notifier) -> None:
    """Tell systemd how the workers' loading goes, and when all are ready (but those that never will be)."""
    said = ""
    while not engine.is_started():
        workers = engine.workers()
        states = ", ".join(f"worker {worker.index} {worker.state}" for worker in workers)
        if states != said:
            notifier.status(states)
            said = states
        if not any(worker.restarts for worker in workers):  # loading; a worker that dies is no progress
            notifier.extend_start(START_EXTENSION_S)
        await asyncio.sleep(READY_POLL_S)
    while not notifier.ready():
        await asyncio.sleep(READY_POLL_S)
    log.info("ready")


async def _feed_watchdog(engine: Engine, notifier: Notifier, watchdog_s: float) -> None:
    """As long as the supervisor beats, and beats again between two of these."""
    beats = -1
    while notifier.connected and watchdog_s:
        if engine.beats != beats:
            beats = engine.beats
            notifier.watchdog()
        await asyncio.sleep(watchdog_s / 3)


async def _drain(admission: Admission, engine: Engine, config: ServeConfig) -> None:
    """readyz says no; after the delay new work gets 503; what is under way has until the limit, which
    requests and the encodes behind them share."""
    log.info("draining: %d requests under way", admission.statistics().in_flight)
    admission.leave()
    await asyncio.sleep(config.shutdown_delay_s)
    admission.close()
    ends_s = time.monotonic() + config.shutdown_timeout_s
    if not await admission.wait_idle(config.shutdown_timeout_s):
        log.warning("%d requests were not done in time", admission.statistics().in_flight)
        admission.abort()
        await admission.wait_idle(ANSWER_GRACE_S)
    await engine.drain(max(0.0, ends_s - time.monotonic()))


def longest_stop_s(config: ServeConfig) -> float:
    """From SIGTERM to the exit: the drain, then what answers, workers and connections have to end in."""
    drain_s = config.shutdown_delay_s + config.shutdown_timeout_s
    return drain_s + ANSWER_GRACE_S + STOP_GRACE_S + 2 * CLOSE_TIMEOUT_S + STOP_MARGIN_S


def _addresses(sockets: list[socket.socket]) -> list[str]:
    return [
        f"unix:{bound.getsockname()}"
        if bound.family == socket.AF_UNIX
        else f"http://{bound.getsockname()[0]}:{bound.getsockname()[1]}"
        for bound in sockets
    ]
