"""Which module of ours imports which, read from the source: with the module, and inside its functions."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OURS = ("serve_app", "deployments", "training", "benchmarks")
FILES = sorted(path for package in OURS for path in (ROOT / package).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in FILES}


class Imports(ast.NodeVisitor):
    """Absolute names of what a module imports; `lazy` collects those inside functions."""

    def __init__(self, module: str, is_package: bool) -> None:
        self.base = module.split(".") if is_package else module.split(".")[:-1]
        self.eager: set[str] = set()
        self.lazy: set[str] = set()
        self.depth = 0

    def _add(self, name: str) -> None:
        (self.lazy if self.depth else self.eager).add(name)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = self.base[: len(self.base) - node.level + 1] if node.level else []
        origin = ".".join([*base, *([node.module] if node.module else [])])
        for alias in node.names:
            whole = f"{origin}.{alias.name}"
            self._add(whole if whole in MODULES else origin)

    def visit_Call(self, node: ast.Call) -> None:
        # importlib.import_module("x") and __import__("x") are imports too.
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called in ("import_module", "__import__") and node.args and isinstance(node.args[0], ast.Constant):
            self._add(str(node.args[0].value))
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        test = node.test
        if (test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", "")) == "TYPE_CHECKING":
            for child in node.orelse:
                self.visit(child)
        else:
            self.generic_visit(node)

    def _function(self, node: ast.AST) -> None:
        self.depth += 1
        self.generic_visit(node)
        self.depth -= 1

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = _function


@cache
def imports_of(module: str) -> tuple[frozenset[str], frozenset[str]]:
    """(imported with the module, imported inside its functions)."""
    path = MODULES[module]
    found = Imports(module, path.name == "__init__.py")
    found.visit(ast.parse(path.read_text(encoding="utf-8")))
    return frozenset(found.eager), frozenset(found.lazy)


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def chain_to(start: str, forbidden: set[str], lazy: bool) -> list[str] | None:
    """The shortest chain of imports from a module of ours to a forbidden distribution."""
    queue, seen = [[start]], {start}
    while queue:
        chain = queue.pop(0)
        eager_names, lazy_names = imports_of(chain[-1])
        names = eager_names | lazy_names if lazy and chain[-1] != "serve_app" else eager_names
        for name in sorted(names):
            if name.split(".")[0] in forbidden:
                return [*chain, name]
            # Importing a.b.c runs a, a.b and a.b.c.
            parts = name.split(".")
            for end in range(1, len(parts) + 1):
                step = ".".join(parts[:end])
                if step in MODULES and step not in seen:
                    seen.add(step)
                    queue.append([*chain, step])
    return None


def room(module: str) -> str:
    """The folder or file directly below a package of ours."""
    return ".".join(module.split(".")[:2])
