"""The little language of the protocol models: programs of one process, in steps that touch shared memory.

A Program is a list of instructions with labels (plain strings) between them, over private registers.
Instructions that touch only registers run together with the step before them, so the explorer
interleaves nothing but what another process can see. Used by the models, run by explorer.py.
"""

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

Registers = Any  # a namedtuple of one program's registers
Value = int | Callable[[Registers], int]
Location = str | Callable[[Registers], str]


class Order(Enum):
    """C11 memory orders, as the C code names them."""

    RELAXED = "relaxed"
    ACQUIRE = "acquire"
    RELEASE = "release"
    ACQUIRE_RELEASE = "acquire-release"
    SEQ_CST = "seq_cst"

    @property
    def acquires(self) -> bool:
        """Whether a load or fence of this order is an acquire."""
        return self in (Order.ACQUIRE, Order.ACQUIRE_RELEASE, Order.SEQ_CST)

    @property
    def releases(self) -> bool:
        """Whether a store or fence of this order is a release."""
        return self in (Order.RELEASE, Order.ACQUIRE_RELEASE, Order.SEQ_CST)


# --- steps that other processes can see ---
@dataclass(frozen=True, slots=True)
class Load:
    """register = location."""

    into: str
    location: Location
    order: Order = Order.RELAXED


@dataclass(frozen=True, slots=True)
class Store:
    """location = value."""

    location: Location
    value: Value
    order: Order = Order.RELAXED


@dataclass(frozen=True, slots=True)
class Exchange:
    """register, location = location, value: one atomic step on memory."""

    into: str
    location: Location
    value: Value
    order: Order = Order.ACQUIRE_RELEASE


@dataclass(frozen=True, slots=True)
class Fence:
    """atomic_thread_fence."""

    order: Order = Order.SEQ_CST


@dataclass(frozen=True, slots=True)
class FutexWait:
    """Sleep if location still holds the expected value; the comparison and going to sleep are one step.

    expected None: sleep whatever it holds (no kernel does that; for broken variants).
    The kernel documents a full barrier in both futex calls, so both are fences here.
    """

    location: Location
    expected: Value | None


@dataclass(frozen=True, slots=True)
class FutexWake:
    """Wake every process that sleeps on location."""

    location: Location


@dataclass(frozen=True, slots=True)
class BellRing:
    """eventfd write. Deliberately no fence: nothing may lean on one."""

    bell: str


@dataclass(frozen=True, slots=True)
class BellWait:
    """Sleep until the eventfd is readable; it stays readable until BellClear."""

    bell: str


@dataclass(frozen=True, slots=True)
class BellClear:
    """eventfd read, non-blocking."""

    bell: str


@dataclass(frozen=True, slots=True)
class AwaitExit:
    """Wait for proof that a process has ended (pidfd). All its stores that will ever land have landed."""

    process: str
    only_death: bool = False


@dataclass(frozen=True, slots=True)
class Choose:
    """Go on, or jump: both are explored."""

    target: str


# --- steps in registers only ---
@dataclass(frozen=True, slots=True)
class Let:
    """Change registers."""

    updates: Callable[[Registers], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Jump:
    """Go to a label, always or if the condition holds."""

    target: str
    condition: Callable[[Registers], bool] | None = None


@dataclass(frozen=True, slots=True)
class Check:
    """A promise at this place of the program; the message names what is broken."""

    condition: Callable[[Registers], bool]
    broken: str


VisibleStep = (
    Load
    | Store
    | Exchange
    | Fence
    | FutexWait
    | FutexWake
    | BellRing
    | BellWait
    | BellClear
    | AwaitExit
    | Choose
)
Instruction = VisibleStep | Let | Jump | Check


class BrokenPromise(Exception):
    """A Check did not hold."""


class Program:
    """One process: its instructions, where its labels are, and its registers at the start."""

    def __init__(
        self, name: str, registers: dict[str, Any], steps: list[Instruction | str], *, crashes: bool = False
    ) -> None:
        """crashes: whether kill -9 may stop it, at any step."""
        self.name = name
        self.crashes = crashes
        self.labels: dict[str, int] = {}
        self.instructions: list[Instruction] = []
        for step in steps:
            if isinstance(step, str):
                self.labels[step] = len(self.instructions)
            else:
                self.instructions.append(step)
        self.initial = namedtuple("Registers", registers)(**registers)

    def begins_with_a_join(self, counter: int) -> bool:
        """Whether the step at counter waits for another process to end."""
        return counter < len(self.instructions) and isinstance(self.instructions[counter], AwaitExit)

    def run_private_steps(self, counter: int, registers: Registers) -> tuple[int, Registers]:
        """Run register-only instructions until one that others can see, or the end."""
        while counter < len(self.instructions):
            instruction = self.instructions[counter]
            counter += 1
            if isinstance(instruction, Let):
                registers = registers._replace(**instruction.updates(registers))
            elif isinstance(instruction, Jump):
                if instruction.condition is None or instruction.condition(registers):
                    counter = self.labels[instruction.target]
            elif isinstance(instruction, Check):
                if not instruction.condition(registers):
                    raise BrokenPromise(f"{self.name}: {instruction.broken}")
            else:
                return counter - 1, registers
        return counter, registers
