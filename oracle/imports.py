"""Which of a program's own files its imports lead to, read from source: nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class OwnCode:
    """Which modules are a program's own, as against the libraries it uses.

    Attributes:
        folder: where its absolute imports are looked up.
        package: the one top-level package or module in that folder that is its own; empty if all
            are.
        foreign: top-level names that are never its own.
    """

    folder: Path
    package: str = ""
    foreign: tuple[str, ...] = ()

    def nodes(self, source: Path) -> Iterator[ast.AST]:
        """Walk the syntax of a file, and of each file of the program's own that imports lead to.

        A package's ``__init__.py`` is read where the package is imported or imported from, and not
        on the way to a module in it. What stands under ``if TYPE_CHECKING`` never runs and is left
        out. So is what cannot be read or parsed: importing it meets the same fault and can say so.
        """
        waiting, seen = [source], set()
        while waiting:
            path = waiting.pop()
            # A link to a folder above could make the names of one file endless.
            if path.resolve() in seen:
                continue
            seen.add(path.resolve())
            try:
                tree = ast.parse(path.read_bytes())
            except (OSError, SyntaxError, ValueError, RecursionError):
                continue
            for node in _running(tree):
                yield node
                waiting += self._imported(node, path)

    def _imported(self, node: ast.AST, importer: Path) -> Iterator[Path]:
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield from self._absolute(alias.name)
            case ast.ImportFrom(module=module, names=names, level=0):
                yield from self._absolute(str(module), names)
            case ast.ImportFrom(module=module, names=names, level=level):
                yield from self._relative(importer, level, module or "", names)

    def _absolute(self, module: str, names: list[ast.alias] | None = None) -> Iterator[Path]:
        top = module.partition(".")[0]
        if top not in self.foreign and self.package in ("", top):
            yield from _files(self.folder, module, names)

    def _relative(
        self, importer: Path, level: int, module: str, names: list[ast.alias]
    ) -> Iterator[Path]:
        # In a package's __init__.py, too, one dot stands for the folder that the file is in.
        above = importer.parents[level - 1 : level]
        if above and above[0].is_relative_to(self.folder / self.package):
            yield from _files(above[0], module, names)


def _running(tree: ast.Module) -> Iterator[ast.AST]:
    """Walk the parts of a module that may run."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        match node:
            case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
                waiting += node.orelse
            case _:
                yield node
                waiting += ast.iter_child_nodes(node)


def _files(folder: Path, module: str, names: list[ast.alias] | None) -> Iterator[Path]:
    """Find the files of a module and of those modules in it that an import may name."""
    place = folder.joinpath(*module.split(".")) if module else folder
    places = [place]
    if names is None:
        # ``import a.b`` makes ``a`` known, with all that its __init__.py brings.
        places += place.parents[: module.count(".")]
    else:
        places += [place / alias.name for alias in names]
    for path in places:
        # A package comes before a module of its name.
        found = (path / "__init__.py", path.parent / f"{path.name}.py")
        yield from [file for file in found if file.is_file()][:1]
