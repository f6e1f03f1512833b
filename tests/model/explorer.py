"""Explores every interleaving of a few programs over a memory model, with a kill -9 at every step.

Explicit states, breadth first, so the first violation found has a shortest trace. Beside the programs'
own steps there are the steps of the machine: a buffered store lands, a process that may crash is
killed (what has landed stays; what has not may still land or is lost). Used by the test files here.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.model.memory import Memory, put
from tests.model.program import (
    AwaitExit,
    BellClear,
    BellRing,
    BellWait,
    BrokenPromise,
    Choose,
    Exchange,
    Fence,
    FutexWait,
    FutexWake,
    Load,
    Order,
    Program,
    Store,
)

RUNNING = -1
DONE = -2
DEAD = -3  # 0 and above: asleep on the futex at that location

Step = tuple[str, Any]  # what happened, the state after it


@dataclass(frozen=True)
class Model:
    """What is explored: programs, the shared words at the start, the promises."""

    programs: tuple[Program, ...]
    locations: dict[str, int]
    bells: tuple[str, ...] = ()
    crash_count: int = 0
    invariant: Callable[["Snapshot"], str | None] = lambda snapshot: None
    at_rest: Callable[["Snapshot"], str | None] = lambda snapshot: None


@dataclass(frozen=True)
class Violation:
    """A broken promise and a shortest way to it."""

    broken: str
    trace: list[str]

    def __str__(self) -> str:
        return "\n".join([self.broken, *(f"  {line}" for line in self.trace)])


@dataclass
class Exploration:
    """The outcome: violation is None when every reachable state keeps every promise."""

    state_count: int = 0
    rest_count: int = 0
    violation: Violation | None = None
    came_from: dict[Any, tuple[Any, str] | None] = field(default_factory=dict, repr=False)


class Snapshot:
    """What a promise may look at: registers and fates of the processes, words in memory."""

    def __init__(self, explorer: "_Explorer", state: Any) -> None:
        self._explorer = explorer
        self._state = state

    def registers(self, name: str) -> Any:
        """The registers of the process with this name."""
        return self._state[0][self._explorer.process_index[name]][2]

    def fate(self, name: str) -> str:
        """running (or blocked), asleep, done or dead."""
        status = self._state[0][self._explorer.process_index[name]][1]
        return {RUNNING: "running", DONE: "done", DEAD: "dead"}.get(status, "asleep")

    def word(self, location: str) -> int:
        """The value in memory."""
        explorer = self._explorer
        return explorer.memory.in_memory(self._state[1], explorer.location_index[location])


def explore(model: Model, memory: Memory, state_limit: int = 400_000) -> Exploration:
    """Visit every reachable state; stop at the first violation. RuntimeError above state_limit."""
    explorer = _Explorer(model, memory)
    outcome = Exploration()
    try:
        first = explorer.initial()
    except BrokenPromise as broken:
        outcome.violation = Violation(str(broken), [])
        return outcome
    came_from = outcome.came_from
    came_from[first] = None
    queue = deque([first])
    while queue:
        state = queue.popleft()
        outcome.state_count += 1
        if outcome.state_count > state_limit:
            raise RuntimeError(f"more than {state_limit} states")
        broken_promise = explorer.judge(state)
        at_rest = True
        try:
            for label, following in explorer.steps(state):
                at_rest = False
                if following not in came_from:
                    came_from[following] = (state, label)
                    queue.append(following)
        except BrokenPromise as broken:
            broken_promise = broken_promise or str(broken)
            at_rest = False
        if at_rest:
            outcome.rest_count += 1
            broken_promise = broken_promise or model.at_rest(Snapshot(explorer, state))
        if broken_promise:
            outcome.violation = Violation(broken_promise, _trace(came_from, state))
            return outcome
    return outcome


def _trace(came_from: dict[Any, tuple[Any, str] | None], state: Any) -> list[str]:
    trace: list[str] = []
    while (origin := came_from[state]) is not None:
        state, label = origin
        trace.append(label)
    return trace[::-1]


class _Explorer:
    """The transition relation over states (processes, memory, bells, crashes left).

    A process is (counter, status, registers); its counter stands at a step that others can see.
    """

    def __init__(self, model: Model, memory: Memory) -> None:
        self.model = model
        self.memory = memory
        self.process_index = {program.name: index for index, program in enumerate(model.programs)}
        self.location_index = {name: index for index, name in enumerate(model.locations)}
        self.location_names = tuple(model.locations)
        self.bell_index = {name: index for index, name in enumerate(model.bells)}

    def initial(self) -> Any:
        """The state before anything has run."""
        memory = self.memory.initial(tuple(self.model.locations.values()), len(self.model.programs))
        processes: tuple[Any, ...] = tuple((0, RUNNING, program.initial) for program in self.model.programs)
        state = (processes, memory, (0,) * len(self.model.bells), self.model.crash_count)
        for index, program in enumerate(self.model.programs):
            counter, registers = program.run_private_steps(0, program.initial)
            state = self._moved(state, index, counter, registers)
            if program.begins_with_a_join(counter):
                state = put(state, 1, self.memory.retire(state[1], index))
        return state

    def judge(self, state: Any) -> str | None:
        """The model's invariant."""
        return self.model.invariant(Snapshot(self, state))

    def steps(self, state: Any) -> Iterator[Step]:
        """Every step that may come next."""
        processes, memory, bells, crashes_left = state
        for index, program in enumerate(self.model.programs):
            _, status, registers = processes[index]
            if status == RUNNING:
                yield from self._program_steps(state, index, program)
            for location, value, landed in self.memory.landings(memory, index):
                label = f"(machine) {program.name}'s {self.location_names[location]} = {value} lands"
                yield label, (processes, landed, bells, crashes_left)
            if status == DEAD:
                forgotten = self.memory.forget_buffered(memory, index)
                if forgotten is not None:
                    yield (
                        f"(machine) {program.name}'s last stores are lost",
                        (processes, forgotten, bells, crashes_left),
                    )
            elif program.crashes and crashes_left and status != DONE:
                dead = put(processes, index, (0, DEAD, registers))
                retired = self.memory.retire(memory, index)
                yield f"(machine) kill -9 {program.name}", (dead, retired, bells, crashes_left - 1)

    def _moved(self, state: Any, index: int, counter: int, registers: Any) -> Any:
        """The state with one process standing at counter; it is done when nothing is left to run."""
        processes, memory, bells, crashes_left = state
        status = RUNNING
        if counter >= len(self.model.programs[index].instructions):
            status = DONE
            counter = 0
            memory = self.memory.retire(memory, index)
        return put(processes, index, (counter, status, registers)), memory, bells, crashes_left

    def _program_steps(self, state: Any, index: int, program: Program) -> Iterator[Step]:
        processes, memory, bells, crashes_left = state
        counter, _, registers = processes[index]
        instruction = program.instructions[counter]

        def advance(
            memory: Any, registers: Any = registers, bells: Any = bells, to: int = counter + 1
        ) -> Any:
            following, changed = program.run_private_steps(to, registers)
            return self._moved((processes, memory, bells, crashes_left), index, following, changed)

        def say(text: str) -> str:
            return f"{program.name}: {text}"

        match instruction:
            case Load(into, location, order):
                name, where = self._location(location, registers)
                for value, after in self.memory.load(memory, index, where, order):
                    yield (
                        say(f"load {name} -> {value} ({order.value})"),
                        advance(after, registers._replace(**{into: value})),
                    )
            case Store(location, value, order):
                name, where = self._location(location, registers)
                stored = _value(value, registers)
                after = self.memory.store(memory, index, where, stored, order)
                yield say(f"store {name} = {stored} ({order.value})"), advance(after)
            case Exchange(into, location, value, order):
                name, where = self._location(location, registers)
                stored = _value(value, registers)
                outcome = self.memory.exchange(memory, index, where, stored, order)
                if outcome is not None:
                    old, after = outcome
                    yield (
                        say(f"exchange {name} = {stored} -> {old}"),
                        advance(after, registers._replace(**{into: old})),
                    )
            case Fence(order):
                after = self.memory.fence(memory, index, order)
                if after is not None:
                    yield say(f"fence ({order.value})"), advance(after)
            case FutexWait(location, expected):
                after = self.memory.fence(memory, index, Order.SEQ_CST)
                if after is not None:
                    yield self._futex_wait(location, expected, index, registers, advance(after), say)
            case FutexWake(location):
                after = self.memory.fence(memory, index, Order.SEQ_CST)
                if after is not None:
                    name, where = self._location(location, registers)
                    yield say(f"futex wake {name}"), self._woken(advance(after), where)
            case BellRing(bell):
                rung = put(bells, self.bell_index[bell], 1)
                yield say(f"ring {bell}"), advance(memory, bells=rung)
            case BellWait(bell):
                if bells[self.bell_index[bell]]:
                    yield say(f"{bell} is readable"), advance(memory)
            case BellClear(bell):
                yield say(f"clear {bell}"), advance(memory, bells=put(bells, self.bell_index[bell], 0))
            case AwaitExit(process, only_death):
                ended = self.process_index[process]
                if processes[ended][1] == DEAD or (processes[ended][1] == DONE and not only_death):
                    after = self.memory.join(memory, index, ended)
                    if after is not None:
                        yield say(f"{process} has ended"), advance(after)
            case Choose(target):
                yield say("goes on"), advance(memory)
                yield say(f"goes to {target}"), advance(memory, to=program.labels[target])
            case _:
                raise AssertionError(f"not a visible step: {instruction}")

    def _futex_wait(
        self, location: Any, expected: Any, index: int, registers: Any, moved: Any, say: Callable[[str], str]
    ) -> Step:
        name, where = self._location(location, registers)
        found = self.memory.in_memory(moved[1], where)
        if expected is not None and found != _value(expected, registers):
            return say(f"futex wait {name}: it is {found}, no sleep"), moved
        processes, memory, bells, crashes_left = moved
        counter, _, changed = processes[index]
        asleep = put(processes, index, (counter, where, changed))
        return say(f"futex wait {name}: sleeps"), (asleep, memory, bells, crashes_left)

    def _woken(self, state: Any, where: int) -> Any:
        processes, memory, bells, crashes_left = state
        woken = tuple(
            (counter, RUNNING, registers) if status == where else (counter, status, registers)
            for counter, status, registers in processes
        )
        return woken, memory, bells, crashes_left

    def _location(self, location: Any, registers: Any) -> tuple[str, int]:
        name = location(registers) if callable(location) else location
        return name, self.location_index[name]


def _value(value: Any, registers: Any) -> int:
    number: int = value(registers) if callable(value) else value
    return number
