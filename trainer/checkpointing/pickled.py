"""Reads a pickle as data: what it names is looked up in a list of known names, and never imported or called.

A pickle is a program for a stack machine. This machine knows the instructions that torch's checkpoints need. Where a
program calls a class, `Made` notes which, with what."""

from __future__ import annotations

import pickletools
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any, TypeVar

from trainer.checkpointing.files import shown

T = TypeVar("T")


@dataclass(frozen=True)
class Name:
    """A class or function by its full name."""

    name: str


@dataclass(eq=False)
class Made:
    """What a call of `name` with `arguments` would have made; `state`: what it would have been filled with."""

    name: str
    arguments: Any
    state: Any = None


@dataclass(eq=False)
class Pairs:
    """A dictionary whose keys are not hashed: one made of itself would take for ever."""

    items: list[tuple[Any, Any]] = field(default_factory=list)

    def named(self) -> dict[str, Any]:
        """The dictionary; ValueError if a key is no text."""
        if not all(isinstance(key, str) for key, _ in self.items):
            raise ValueError("a key is no text")
        return dict(self.items)


PERSISTENT = "persistent_id"
"""The name under which what lies outside of a pickle is noted, such as the values of a tensor."""


class UnknownName(ValueError):
    """A pickle names what no checkpoint needs."""


def expect(kind: type[T], value: Any) -> T:
    """`value`, if it is a `kind`; ValueError if not."""
    if not isinstance(value, kind):
        raise ValueError(f"a {type(value).__name__} where a {kind.__name__} belongs")
    return value


def read_pickle(data: bytes, known: Container[str]) -> Any:
    """The content of a pickle: plain values, tuples, lists, `Pairs`, `Name` and `Made`.

    ValueError where it names what is not `known`, has an instruction that checkpoints do not need, or is malformed."""
    machine = _Machine(known)
    try:
        for instruction, argument, _ in pickletools.genops(data):
            machine.run(instruction.name, argument)
        (content,) = machine.stack
    except UnknownName:
        raise
    except (ValueError, LookupError) as error:
        raise ValueError(f"no pickle that a checkpoint could hold: {shown(str(error))}") from None
    return content


class _Machine:
    def __init__(self, known: Container[str]):
        self.known = known
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []
        """Stacks under the marks that are open."""
        self.memo: dict[int, Any] = {}

    def run(self, instruction: str, argument: Any) -> None:
        stack = self.stack
        match instruction:
            case "PROTO" | "FRAME" | "STOP":
                pass
            case "NONE":
                stack.append(None)
            case "NEWTRUE" | "NEWFALSE":
                stack.append(instruction == "NEWTRUE")
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "SHORT_BINUNICODE" | "BINUNICODE":
                stack.append(argument)
            case "MARK":
                self.below.append(stack)
                self.stack = []
            case "EMPTY_TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple(self._pop(("EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3").index(instruction))))
            case "TUPLE":
                self._marked(lambda under, items: under.append(tuple(items)))
            case "EMPTY_LIST":
                stack.append([])
            case "APPEND":
                expect(list, stack[-2]).append(stack.pop())
            case "APPENDS":
                self._marked(lambda under, items: expect(list, under[-1]).extend(items))
            case "EMPTY_DICT":
                stack.append(Pairs())
            case "SETITEM":
                key, value = self._pop(2)
                expect(Pairs, stack[-1]).items.append((key, value))
            case "SETITEMS":
                self._marked(lambda under, items: expect(Pairs, under[-1]).items.extend(zip(items[::2], items[1::2])))
            case "MEMOIZE":
                self.memo[len(self.memo)] = stack[-1]
            case "BINPUT" | "LONG_BINPUT":
                self.memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(self.memo[argument])
            case "GLOBAL":
                stack.append(self._name(*argument.split(" ", 1)))
            case "STACK_GLOBAL":
                stack.append(self._name(*self._pop(2)))
            case "REDUCE" | "NEWOBJ":
                called, arguments = self._pop(2)
                stack.append(Made(expect(Name, called).name, expect(tuple, arguments)))
            case "BUILD":
                state = stack.pop()
                expect(Made, stack[-1]).state = state
            case "BINPERSID":
                stack.append(Made(PERSISTENT, stack.pop()))
            case _:
                raise ValueError(f"the instruction {instruction}")

    def _name(self, module: Any, name: Any) -> Name:
        full = f"{expect(str, module)}.{expect(str, name)}"
        if full not in self.known:
            raise UnknownName(f"it names {shown(full)}, which no checkpoint needs; nothing was run")
        return Name(full)

    def _pop(self, number: int) -> list[Any]:
        if len(self.stack) < number:
            raise IndexError("a stack that is empty")
        taken = self.stack[len(self.stack) - number :]
        del self.stack[len(self.stack) - number :]
        return taken

    def _marked(self, action: Any) -> None:
        items, self.stack = self.stack, self.below.pop()
        action(self.stack, items)
