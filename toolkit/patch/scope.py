"""Which function of a C or C++ file, or which command of a CMake file, a line belongs to."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import PurePosixPath

# What never counts as code: comments, literals. A quote after a digit separates digits.
_BLANK = (
    r"//(?:\\\n|[^\n])*|/\*.*?\*/"
    r"|R\"(?P<raw>[^()\\\s]*)\(.*?\)(?P=raw)\""
    r"|\"(?:\\.|[^\"\\\n])*\"|(?<!\w)'(?:\\.|[^'\\\n])*'"
)
_TOKEN = re.compile(
    rf"(?P<directive>^[ \t]*\#(?:\\\n|[^\n])*)|(?P<blank>{_BLANK})|(?P<mark>[{{}}();])",
    re.DOTALL | re.MULTILINE,
)
_DIRECTIVE = re.compile(r"[ \t]*#[ \t]*(if|elif|else|endif)")
_CONTAINER = re.compile(r"(?:^|\s)(struct|class|union|enum|namespace|extern)\b\s*(?:class\b\s*)?([\w:]*)")
_NAME = re.compile(r"((?:\w+\s*(?:<[^<>]*>)?\s*::\s*)*(?:operator\s*[^\w\s(]+|~?\w+))\s*(?:<[^()]*>)?\s*$")
# Words that stand before a parenthesis and name no function.
_NOT_A_NAME = frozenset(("__attribute__", "__declspec", "alignas", "decltype", "noexcept", "requires", "throw"))

_CMAKE_BLANK = re.compile(r'#\[(=*)\[.*?\]\1\]|#[^\n]*|"(?:\\.|[^"\\])*"', re.DOTALL)
_CMAKE_COMMAND = re.compile(r"^[ \t]*(\w+)[ \t]*\(\s*([^\s()]*)", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Scope:
    """A function with its body, or a CMake command with its arguments."""

    name: str  # `namespace::function` as written, or `command(first argument)`
    first: int  # line where it starts, from 1
    last: int  # line where it ends, inclusive
    opens: tuple[int, int]  # line from 1 and column from 0 of the brace or parenthesis that opens it


def scopes(text: str, file: str) -> tuple[Scope, ...]:
    """The functions (or CMake commands) of a file in order; they do not nest.

    Of alternatives under #if and #else that share a body, the last one counts. Lines end with LF.
    """
    path = PurePosixPath(file)
    return _cmake(text) if path.name == "CMakeLists.txt" or path.suffix == ".cmake" else _functions(text)


def scope_at(found: Iterable[Scope], line: int) -> str:
    """Name of the scope that holds a line, counted from 1; empty outside of all scopes."""
    return next((s.name for s in found if s.first <= line <= s.last), "")


@dataclass
class _Block:
    kind: str  # "container" | "function" | "other"
    name: str = ""
    first: int = 0  # offset of the first character of the head
    opens: int = 0  # offset of the brace


@dataclass
class _State:
    """Where the walk stands; saved at #if and taken back at #else, since both branches continue from there."""

    blocks: list[_Block] = field(default_factory=list)
    parens: int = 0
    head: int = 0  # offset where the current statement starts

    def copy(self) -> _State:
        return _State(blocks=list(self.blocks), parens=self.parens, head=self.head)


def _functions(text: str) -> tuple[Scope, ...]:
    code = list(text)  # with everything that is not code blanked as the walk goes on
    state = _State()
    saved: list[_State] = []
    spans: list[tuple[str, int, int, int]] = []
    for token in _TOKEN.finditer(text):
        if token["mark"] is None:
            for i in range(token.start(), token.end()):
                if code[i] != "\n":
                    code[i] = " "
            directive = _DIRECTIVE.match(token[0]) if token["directive"] is not None else None
            if directive and directive[1] == "if":
                saved.append(state.copy())
            elif directive and directive[1] == "endif" and saved:
                saved.pop()
            elif directive and saved:
                state = saved[-1].copy()
                state.head = token.end()  # what came before it belongs to the other branch
            continue
        mark, at = token["mark"], token.start()
        inside = state.blocks[-1].kind if state.blocks else "container"
        if mark == "(":
            state.parens += 1
        elif mark == ")":
            state.parens = max(0, state.parens - 1)
        elif mark == "{":
            block = _Block(kind="other")
            if inside == "container" and state.parens == 0:
                block = _block("".join(code[state.head : at]), state.head)
                block.opens = at
            state.blocks.append(block)
            if block.kind != "other":
                state.head = at + 1
        elif mark == "}" and state.blocks:
            block = state.blocks.pop()
            if block.kind == "function":
                outer = "::".join(b.name for b in state.blocks if b.name)
                name = f"{outer}::{block.name}" if outer else block.name
                spans.append((name, block.first, at, block.opens))
            # After a brace initialiser the same statement goes on: `: a{1}, b{2} {`.
            if block.kind != "other":
                state.head = at + 1
        elif mark == ";" and state.parens == 0 and inside == "container":
            state.head = at + 1
    starts = _line_starts(text)
    return tuple(
        Scope(name=name, first=_line(starts, first), last=_line(starts, last), opens=_position(starts, opens))
        for name, first, last, opens in sorted(spans, key=lambda s: s[1])
    )


def _block(head: str, offset: int) -> _Block:
    """What the brace after this head opens."""
    first = offset + len(head) - len(head.lstrip())
    head = _without_template(head)
    depth, name, end = 0, "", 0
    for i, c in enumerate(head):
        if c == "(":
            found = _NAME.search(head, 0, i) if depth == 0 and not name else None
            if found and found[1] not in _NOT_A_NAME and not re.search(r"(?<!operator)=", head[: found.start()]):
                name = re.sub(r"\s+", "", found[1])
            depth += 1
        elif c == ")":
            depth -= 1
            end = i + 1
    if name:
        # In a constructor's list of initialisers, a brace after a name initialises that member.
        if re.match(r"\s*(?:noexcept\s*)?:(?!:)", _after_parameters(head)) and re.search(r"[\w>]\s*$", head[end:]):
            return _Block(kind="other")
        return _Block(kind="function", name=name, first=first)
    container = _CONTAINER.search(head)
    if container and "=" not in head:
        return _Block(kind="container", name=container[2], first=first)
    return _Block(kind="other")


def _without_template(head: str) -> str:
    """The head without a leading `template <...>`, whose parentheses name no function."""
    if not re.match(r"\s*template\b", head):
        return head
    depth = 0
    for i, c in enumerate(head):
        depth += (c == "<") - (c == ">")
        if c == ">" and depth == 0:
            return _without_template(head[i + 1 :])
    return head


def _after_parameters(head: str) -> str:
    """What follows the first balanced parentheses."""
    depth = 0
    for i, c in enumerate(head):
        depth += (c == "(") - (c == ")")
        if c == ")" and depth == 0:
            return head[i + 1 :]
    return ""


def _cmake(text: str) -> tuple[Scope, ...]:
    code = _CMAKE_BLANK.sub(lambda m: re.sub(r"[^\n]", '"' if m[0][0] == '"' else " ", m[0]), text)
    starts = _line_starts(text)
    found: list[Scope] = []
    end = 0
    for command in _CMAKE_COMMAND.finditer(code):
        if command.start() < end:
            continue
        depth, end = 0, len(code) - 1
        opens = code.index("(", command.start())
        for i in range(opens, len(code)):
            depth += (code[i] == "(") - (code[i] == ")")
            if depth == 0:
                end = i
                break
        first, last = _line(starts, command.start(1)), _line(starts, end)
        name = f"{command[1]}({command[2]})"
        found.append(Scope(name=name, first=first, last=last, opens=_position(starts, opens)))
    return tuple(found)


def _line_starts(text: str) -> list[int]:
    return [0, *(m.end() for m in re.finditer("\n", text))]


def _line(starts: list[int], offset: int) -> int:
    return bisect.bisect_right(starts, offset)


def _position(starts: list[int], offset: int) -> tuple[int, int]:
    line = _line(starts, offset)
    return line, offset - starts[line - 1]
