"""Memory models for the protocol models: what a load may return, when a store lands, what a fence does.

States are immutable tuples, so that the explorer can hash them. Three models:

StoreBuffers(in_order=True)   x86 (TSO): stores wait in a FIFO buffer of their process; an exchange or a
                              seq_cst fence goes on only when the buffer is empty.
StoreBuffers(in_order=False)  relaxed stores may land in any order (per location in order); a release
                              store lands only after everything before it. Catches missing releases.
Views()                       C11 release/acquire as an operational model without promises (Kang et al.,
                              POPL 2017): a load may return any value its process has not yet seen
                              replaced. Catches missing acquires and missing fences beside an exchange
                              too. It never lets a load see a store that comes later in program order.

Used by explorer.py only.
"""

from collections.abc import Iterable
from typing import Any, Protocol

from tests.model.program import Order

State = Any


class Memory(Protocol):
    """What the explorer asks of a memory model. None: not yet, the process's own stores must land first."""

    def initial(self, values: tuple[int, ...], process_count: int) -> State: ...
    def load(
        self, state: State, process: int, location: int, order: Order
    ) -> Iterable[tuple[int, State]]: ...
    def store(self, state: State, process: int, location: int, value: int, order: Order) -> State: ...
    def exchange(
        self, state: State, process: int, location: int, value: int, order: Order
    ) -> tuple[int, State] | None: ...
    def fence(self, state: State, process: int, order: Order) -> State | None: ...
    def landings(self, state: State, process: int) -> Iterable[tuple[int, int, State]]:
        """Stores that may land now: (location, value, state after it)."""
        ...

    def forget_buffered(self, state: State, process: int) -> State | None:
        """After a crash: what has not landed never does. None: nothing was waiting."""
        ...

    def retire(self, state: State, process: int) -> State:
        """The process has ended, or has yet to begin with a join: it will not load before that."""
        ...

    def join(self, state: State, process: int, ended: int) -> State | None:
        """Process has proof that another has ended. None: not while stores of the ended one wait."""
        ...

    def in_memory(self, state: State, location: int) -> int:
        """The value that the kernel finds there (futex)."""
        ...


_BARRIER = -1  # a release fence in a buffer: nothing after it lands before what lies before it


class StoreBuffers:
    """Per-process store buffers over one memory. State: (values, buffers of (location, value, releases))."""

    def __init__(self, *, in_order: bool) -> None:
        self._in_order = in_order

    def __repr__(self) -> str:
        return "x86-TSO" if self._in_order else "unordered-store-buffers"

    def initial(self, values: tuple[int, ...], process_count: int) -> State:
        return values, ((),) * process_count

    def load(self, state: State, process: int, location: int, order: Order) -> Iterable[tuple[int, State]]:
        values, buffers = state
        for buffered_location, value, _ in reversed(buffers[process]):
            if buffered_location == location:
                return [(value, state)]
        return [(values[location], state)]

    def store(self, state: State, process: int, location: int, value: int, order: Order) -> State:
        values, buffers = state
        return values, put(buffers, process, (*buffers[process], (location, value, order.releases)))

    def exchange(
        self, state: State, process: int, location: int, value: int, order: Order
    ) -> tuple[int, State] | None:
        values, buffers = state
        must_wait = self._in_order or order.releases
        if any(must_wait or waiting[0] == location for waiting in buffers[process]):
            return None
        return values[location], (put(values, location, value), buffers)

    def fence(self, state: State, process: int, order: Order) -> State | None:
        values, buffers = state
        if order is Order.SEQ_CST:
            return None if buffers[process] else state
        if self._in_order or not order.releases or not buffers[process]:
            return state
        return values, put(buffers, process, (*buffers[process], (_BARRIER, 0, True)))

    def landings(self, state: State, process: int) -> Iterable[tuple[int, int, State]]:
        values, buffers = state
        buffer = buffers[process]
        seen: set[int] = set()
        for index, (location, value, releases) in enumerate(buffer):
            if index and (self._in_order or location == _BARRIER):
                return
            if location not in seen and not (releases and index):
                rest = buffer[:index] + buffer[index + 1 :]
                while rest and rest[0][0] == _BARRIER:
                    rest = rest[1:]
                yield location, value, (put(values, location, value), put(buffers, process, rest))
            seen.add(location)

    def forget_buffered(self, state: State, process: int) -> State | None:
        values, buffers = state
        return (values, put(buffers, process, ())) if buffers[process] else None

    def retire(self, state: State, process: int) -> State:
        return state

    def join(self, state: State, process: int, ended: int) -> State | None:
        return None if state[1][ended] else state

    def in_memory(self, state: State, location: int) -> int:
        value: int = state[0][location]
        return value


class Views:
    """Every location keeps its history; every process has a view: per location, the oldest it may still read.

    State: (histories of (value, view), threads of (view, acquire_view, release_view, alive), seq_cst view).
    """

    def __repr__(self) -> str:
        return "release-acquire-views"

    def initial(self, values: tuple[int, ...], process_count: int) -> State:
        bottom = (0,) * len(values)
        return (
            tuple(((value, bottom),) for value in values),
            ((bottom, bottom, bottom, True),) * process_count,
            bottom,
        )

    def load(self, state: State, process: int, location: int, order: Order) -> Iterable[tuple[int, State]]:
        histories, threads, global_view = state
        view, acquire_view, release_view, alive = threads[process]
        history = histories[location]
        for index in range(view[location], len(history)):
            value, message_view = history[index]
            seen = put(view, location, index)
            pending = _merge(acquire_view, message_view)
            if order.acquires:
                seen = _merge(seen, message_view)
            thread = (seen, pending, release_view, alive)
            yield value, _tidy((histories, put(threads, process, thread), global_view))

    def store(self, state: State, process: int, location: int, value: int, order: Order) -> State:
        return _tidy(self._append(state, process, location, value, order, None))

    def exchange(
        self, state: State, process: int, location: int, value: int, order: Order
    ) -> tuple[int, State] | None:
        histories, threads, global_view = state
        view, acquire_view, release_view, alive = threads[process]
        old, message_view = histories[location][-1]
        acquire_view = _merge(acquire_view, message_view)
        if order.acquires:
            view = _merge(view, message_view)
        state = (
            histories,
            put(threads, process, (view, acquire_view, release_view, alive)),
            global_view,
        )
        return old, _tidy(self._append(state, process, location, value, order, message_view))

    def _append(
        self, state: State, process: int, location: int, value: int, order: Order, replaced: Any
    ) -> State:
        histories, threads, global_view = state
        view, acquire_view, release_view, alive = threads[process]
        index = len(histories[location])
        view = put(view, location, index)
        message_view = view if order.releases else put(release_view, location, index)
        if replaced is not None:  # an exchange goes on the release sequence of what it replaced
            message_view = _merge(message_view, replaced)
        history = (*histories[location], (value, message_view))
        thread = (view, _merge(acquire_view, view), release_view, alive)
        return put(histories, location, history), put(threads, process, thread), global_view

    def fence(self, state: State, process: int, order: Order) -> State | None:
        histories, threads, global_view = state
        view, acquire_view, release_view, alive = threads[process]
        if order.acquires:
            view = _merge(view, acquire_view)
        if order is Order.SEQ_CST:
            view = global_view = _merge(view, global_view)
        if order.releases:
            release_view = view
        thread = (view, _merge(acquire_view, view), release_view, alive)
        return _tidy((histories, put(threads, process, thread), global_view))

    def landings(self, state: State, process: int) -> Iterable[tuple[int, int, State]]:
        return ()

    def forget_buffered(self, state: State, process: int) -> State | None:
        return None

    def retire(self, state: State, process: int) -> State:
        histories, threads, global_view = state
        view = threads[process][0]
        return _tidy((histories, put(threads, process, (view, view, view, False)), global_view))

    def join(self, state: State, process: int, ended: int) -> State | None:
        histories, threads, global_view = state
        view, acquire_view, release_view, _ = threads[process]
        proven = threads[ended][0]
        thread = (_merge(view, proven), _merge(acquire_view, proven), release_view, True)
        return _tidy((histories, put(threads, process, thread), global_view))

    def in_memory(self, state: State, location: int) -> int:
        value: int = state[0][location][-1][0]
        return value


def put(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    """values with one of them replaced."""
    return values[:index] + (value,) + values[index + 1 :]  # noqa: RUF005 (measured: faster than unpacking)


def _merge(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    return left if left == right else tuple(map(max, left, right))


def _tidy(state: State) -> State:
    """Drop history that no process can load any more, so that equal situations are equal states."""
    histories, threads, global_view = state
    living = [thread[0] for thread in threads if thread[3]]
    if living:
        dropped = tuple(map(min, *living)) if len(living) > 1 else living[0]
    else:
        dropped = tuple(len(history) - 1 for history in histories)
    if not any(dropped):
        return state

    shifted: dict[tuple[int, ...], tuple[int, ...]] = {}

    def shift(view: tuple[int, ...]) -> tuple[int, ...]:
        known = shifted.get(view)
        if known is None:
            known = tuple(
                [index - gone if index > gone else 0 for index, gone in zip(view, dropped, strict=True)]
            )
            shifted[view] = known
        return known

    return (
        tuple(
            [
                tuple([(value, shift(view)) for value, view in history[gone:]])
                for history, gone in zip(histories, dropped, strict=True)
            ]
        ),
        tuple([(shift(seen), shift(read), shift(fenced), alive) for seen, read, fenced, alive in threads]),
        shift(global_view),
    )


X86 = StoreBuffers(in_order=True)
UNORDERED = StoreBuffers(in_order=False)
VIEWS = Views()
ALL_MEMORIES: tuple[Memory, ...] = (X86, UNORDERED, VIEWS)
