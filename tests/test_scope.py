"""Scopes: what a small parser must get right about C, C++ and CMake before a place may be trusted."""

from __future__ import annotations

import pytest

from toolkit.patch.scope import scope_at, scopes


def names(text: str, file: str = "a.cpp") -> list[tuple[str, int, int]]:
    return [(s.name, s.first, s.last) for s in scopes(text, file)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("int f(int a) {\n    return a;\n}\n", [("f", 1, 3)]),
        ("static thread_ret_t\nf(void * data)\n{\n}\n", [("f", 1, 4)]),
        ("static struct ggml_tensor * f(struct ggml_tensor * a) {\n}\n", [("f", 1, 2)]),
        ("int f(void);\n\nint g(void) {\n}\n", [("g", 3, 4)]),
        ("A::A(int a) : p(std::make_unique<impl>(a)), q{1}, r{2} {\n    x();\n}\n", [("A::A", 1, 3)]),
        ("A::~A() = default;\nA::~A() {\n}\n", [("A::~A", 2, 3)]),
        ("size_t A::size() const { return 1; }\n", [("A::size", 1, 1)]),
        ("struct A::impl {\n    impl(int a) {\n    }\n    int n = f(1);\n};\n", [("A::impl::impl", 2, 3)]),
        ("namespace n {\nint f() {\n}\n}\n", [("n::f", 2, 3)]),
        ('extern "C" {\nvoid f(void) {\n}\n}\n', [("f", 2, 3)]),
        ("template <typename T, T (*g)(int)>\nstatic void f(T t) {\n}\n", [("f", 1, 3)]),
        ("template <> void f<block, 8>(int n) {\n}\n", [("f", 1, 2)]),
        ("__attribute__((noinline)) void f(int n) {\n}\n", [("f", 1, 2)]),
        ("static const int table[] = { 1, 2 };\nauto l = [](int x) { return x; };\nvoid f() {\n}\n", [("f", 3, 4)]),
        ("enum e { A, B };\nstruct s { int x; };\nvoid f() {\n}\n", [("f", 3, 4)]),
    ],
)
def test_heads_of_functions(text: str, expected: list[tuple[str, int, int]]) -> None:
    assert names(text) == expected


def test_braces_in_comments_literals_and_macros_do_not_count() -> None:
    text = (
        'void f() {\n    // }\n    /* } \n } */\n    char c = \'}\'; s = "}\\"}";\n    r = R"x(})x";\n}\n'
        "#define OPEN {   \\\n    {\nvoid g() {\n    int n = 1'000'000;\n}\n"
    )
    assert names(text) == [("f", 1, 7), ("g", 10, 12)]


def test_branches_of_the_preprocessor_that_share_a_body() -> None:
    text = "#ifdef A\nvoid f(int a) {\n#else\nvoid f(long a) {\n#endif\n    x();\n}\n\nvoid g() {\n}\n"
    assert names(text) == [("f", 4, 7), ("g", 9, 10)]


def test_two_definitions_under_if_and_else_are_two() -> None:
    text = "#ifdef A\nvoid f() {\n}\n#else\nvoid f() {\n}\n#endif\n"
    assert names(text) == [("f", 2, 3), ("f", 5, 6)]


def test_one_branch_closes_what_was_open_before_it() -> None:
    text = "void f() {\n#ifdef A\n    if (a) {\n#else\n    if (b) {\n#endif\n        x();\n    }\n}\nvoid g() {\n}\n"
    assert names(text) == [("f", 1, 9), ("g", 10, 11)]


def test_commands_of_cmake() -> None:
    text = (
        "# add_library(no\nadd_library(ggml-base\n            ggml.c\n            # a ) in a comment\n"
        "            gguf.cpp)\n\nif (X)\n    target_link_libraries(ggml PUBLIC ggml-base)\nendif()\n"
    )
    assert names(text, "src/CMakeLists.txt") == [
        ("add_library(ggml-base)", 2, 5),
        ("if(X)", 7, 7),
        ("target_link_libraries(ggml)", 8, 8),
        ("endif()", 9, 9),
    ]


def test_scope_of_a_line() -> None:
    found = scopes("int x;\nvoid f() {\n    y();\n}\n\nvoid g() {}\n", "a.c")
    assert [scope_at(found, line) for line in range(1, 7)] == ["", "f", "f", "f", "", "g"]
