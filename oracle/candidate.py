"""What is judged: naming a candidate, finding its source, loading it.

A candidate is named ``package.module:function`` or ``path/to/file.py:function``. Its imports work
as in the user's shell: those of a module as if ``python`` had been started in the current folder,
those of a file as if it had been started as ``python path/to/file.py``. The one exception is
:data:`OWN_PACKAGES`, which a file of the same name in the current folder cannot shadow.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib
import inspect
import linecache
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Literal

from .imports import OwnCode

OWN_PACKAGES = ("oracle", "fast")
"""Import packages of this distribution; ``fast.module:function`` always means ours."""

_MESSAGE_LIMIT = 500
"""Characters of a candidate's own exception text that a message repeats."""
_NAMES_SHOWN = 5
_HOW_TO_NAME = "write package.module:function or path/to/file.py:function"


class BadCandidate(ValueError):
    """A candidate that cannot be named, found, loaded or called; the message says what to do.

    Attributes:
        output_text: what the candidate printed while it was loaded, shortened; empty where it
            was not loaded in a process of its own.
    """

    def __init__(self, message: str, output_text: str = "") -> None:
        super().__init__(message)
        self.output_text = output_text


@dataclass(frozen=True)
class CandidateReference:
    """A candidate as it was named, not yet loaded.

    Attributes:
        text: the name as given.
        kind: ``"module"`` or ``"file"``.
        location: the module's dotted name, or the file's absolute path.
        function: the function's name; with dots for one inside a class.
    """

    text: str
    kind: Literal["module", "file"]
    location: str
    function: str


def parse_candidate(text: str) -> CandidateReference:
    """Read ``package.module:function`` or ``path/to/file.py:function``.

    A location with a slash, or one that ends in ``.py``, is a path; a relative one starts from the
    current folder. Nothing is imported; that a file exists is checked here, that a module exists
    when it is loaded.

    Raises:
        BadCandidate: if the text is neither, or there is no such file.
    """
    location, colon, function = text.rpartition(":")
    if not colon:
        raise BadCandidate(_missing_function(text))
    if not location:
        raise BadCandidate(f"candidate {text!r} names no module or file; {_HOW_TO_NAME}.")
    if not all(part.isidentifier() for part in function.split(".")):
        raise BadCandidate(
            f"candidate {text!r} names no function: {function!r} is not a function's name;"
            f" {_HOW_TO_NAME}."
        )
    if "/" in location or location.endswith(".py"):
        path = _existing_file(location, text)
        return CandidateReference(text, "file", str(path), function)
    if not all(part.isidentifier() for part in location.split(".")):
        raise BadCandidate(
            f"candidate {text!r}: {location!r} is not a module's name; for a file write its path,"
            f" as in ./{location.rpartition('.')[2] or 'kernel'}.py:{function}."
        )
    return CandidateReference(text, "module", location, function)


def uses_triton(reference: CandidateReference) -> bool:
    """Whether the candidate's own source imports triton, or names ``triton.jit``.

    Its source is its file, and what that imports, and so on, from the candidate's folder (a file's
    own, the current one for a module) or its own top-level package; of other packages nothing is
    read. Nothing is imported: a module's file is looked up, a package in the current folder first.
    False where there is no source, or none that can be parsed.
    """
    source = _source_file(reference)
    if source is None:
        return False
    return any(_is_triton_import(node) for node in _own_code(reference, source).nodes(source))


@contextmanager
def import_path(reference: CandidateReference) -> Iterator[None]:
    """Put the folder that the candidate's imports start from in front of ``sys.path``.

    That is a file's own folder, so that it can import the files beside it, and the current folder
    for a module, or ours for a module of :data:`OWN_PACKAGES`. :func:`load_candidate` does so while
    it loads; a process that serves one candidate holds it as long as it calls, for imports inside
    functions.
    """
    folder = _import_folder(reference)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        # The candidate may have changed the list, or replaced it.
        if folder in sys.path:
            sys.path.remove(folder)


def load_candidate(
    reference: CandidateReference, parameters: Sequence[str], operator: str = "the operator"
) -> Callable[..., Any]:
    """Import a candidate and check that it can be called with the given positional arguments.

    A file becomes a module under a private name, compiled from its source as it is now (a cached
    bytecode file may be older within the same second), and shadows nothing. The modules it imports
    get their public names, so load candidates that are strangers to each other in processes of
    their own.

    Args:
        reference: the candidate.
        parameters: names of the arguments it will be called with, in order.
        operator: who calls, for the message about a wrong number of parameters.

    Raises:
        BadCandidate: if importing it fails, or it has no such function, or the function cannot
            take the arguments. A signature that Python cannot read is let through.
    """
    with import_path(reference):
        try:
            module = _import(reference)
            function = _look_up(module, reference.function)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            # Import code may raise anything, SystemExit too.
            raise BadCandidate(_import_failure(reference, error)) from error
    if function is None:
        raise BadCandidate(_no_such_function(reference, module))
    check_candidate(reference.text, function, parameters, operator)
    return function  # type: ignore[no-any-return]


def _look_up(module: ModuleType, name: str) -> Any:
    """Return what a module holds under a name with dots; None where there is nothing."""
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def check_candidate(
    name: str, function: object, parameters: Sequence[str], operator: str = "the operator"
) -> None:
    """Check that something can be called with the given positional arguments.

    Args:
        name: what it is called in messages.
        function: what should be a function.
        parameters: names of the arguments it will be called with, in order.
        operator: who calls.

    Raises:
        BadCandidate: if it is no function, or takes other arguments. A signature that Python
            cannot read is let through.
    """
    _check_callable(name, function)
    _check_parameters(name, function, parameters, operator)


def describe_exception(error: BaseException) -> str:
    """Say an exception's type and text on one line, the text shortened to 500 characters."""
    try:
        text = _printable(" ".join(str(error).split()))
    except BaseException:  # noqa: BLE001 - the candidate's own __str__ may raise anything
        text = "(its text cannot be shown)"
    if len(text) > _MESSAGE_LIMIT:
        text = text[:_MESSAGE_LIMIT] + "..."
    name = type(error).__name__
    return f"{name}: {text}" if text else name


def _printable(text: str) -> str:
    """Escape what would move a terminal's cursor or change its colours."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def line_in(error: BaseException, files: Sequence[str]) -> str:
    """Find where an exception passed through one of ``files``: ``path:line``, the innermost.

    Where it never did, the innermost line outside the import machinery and this package's own
    modules; empty where there is none.
    """
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return f"{error.filename}:{error.lineno}"
    lines = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith("<frozen importlib") and line
    ]
    inside = [(name, line) for name, line in lines if name in files]
    own = Path(__file__).parent
    foreign = [(name, line) for name, line in lines if Path(name).parent != own]
    for found in (inside, foreign):
        if found:
            return f"{found[-1][0]}:{found[-1][1]}"
    return ""


def _missing_function(text: str) -> str:
    path = Path(text).expanduser()
    if not path.is_file():
        return f"candidate {text!r} has no ':function'; {_HOW_TO_NAME}."
    names = _defined_functions(path)
    which = f" Its functions: {', '.join(names)}." if names else ""
    return f"candidate {text!r} has no ':function'; write {text}:{(names or ['NAME'])[0]}.{which}"


def _defined_functions(path: Path) -> list[str]:
    """List the first public functions that a file defines, without importing it."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        # Only a hint is lost.
        return []
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [name for name in names if not name.startswith("_")][:_NAMES_SHOWN]


def _existing_file(location: str, text: str) -> Path:
    path = Path(location).expanduser().absolute()
    if path.is_dir():
        raise BadCandidate(
            f"candidate {text!r}: {path} is a folder; name a Python file in it, as in"
            f" {location.rstrip('/')}/kernel.py:function."
        )
    if not path.is_file():
        beside = path.with_name(path.name + ".py")
        hint = f"did you mean {beside}?" if beside.is_file() else "check the path."
        raise BadCandidate(f"candidate {text!r}: there is no file {path}; {hint}")
    return path


def _source_file(reference: CandidateReference) -> Path | None:
    """Find the file a candidate is written in, without importing anything."""
    if reference.kind == "file":
        return Path(reference.location)
    spec = _module_spec(reference)
    if spec is None or not spec.has_location or not spec.origin:
        return None
    return Path(spec.origin)


def _module_spec(reference: CandidateReference) -> ModuleSpec | None:
    """Find a module as :func:`load_candidate` will, without importing the packages it is in."""
    top, *rest = reference.location.split(".")
    spec = PathFinder.find_spec(top, [_import_folder(reference)]) or _installed(top)
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(part, list(spec.submodule_search_locations))
    return spec


def _installed(top: str) -> ModuleSpec | None:
    try:
        return find_spec(top)
    except ValueError:
        # A module that is loaded and has no spec.
        return None


def _import_folder(reference: CandidateReference) -> str:
    """Say where the candidate's imports are looked for first."""
    if reference.kind == "file":
        return str(Path(reference.location).parent)
    if reference.location.partition(".")[0] in OWN_PACKAGES:
        return str(Path(__file__).parent.parent)
    return str(Path.cwd())


def _own_code(reference: CandidateReference, source: Path) -> OwnCode:
    """Say which modules are the candidate's own, as against libraries it uses."""
    if reference.kind == "file":
        return OwnCode(source.parent, foreign=OWN_PACKAGES)
    top, *rest = reference.location.split(".")
    # The folder that holds the top-level package or module.
    folder = source.parents[len(rest) + (source.name == "__init__.py")]
    if folder == Path(_import_folder(reference)) and top not in OWN_PACKAGES:
        return OwnCode(folder, foreign=OWN_PACKAGES)
    return OwnCode(folder, package=top)


def _is_triton_import(node: ast.AST) -> bool:
    match node:
        case ast.Import(names=names):
            return any(alias.name.partition(".")[0] == "triton" for alias in names)
        case ast.ImportFrom(module=str(module), level=0):
            return module.partition(".")[0] == "triton"
        case ast.Attribute(value=ast.Name(id="triton"), attr="jit"):
            return True
        case _:
            return False


class _FreshSourceLoader(SourceFileLoader):
    """Compiles a file from its source every time.

    Cached bytecode is matched by the source's size and whole seconds of its time, so a program
    that rewrites a kernel and judges it again could be answered for the kernel before.
    """

    def get_code(self, fullname: str) -> CodeType:  # noqa: ARG002 - the protocol's argument
        return self.source_to_code(self.get_data(self.path), self.path)


def _import(reference: CandidateReference) -> ModuleType:
    importlib.invalidate_caches()
    if reference.kind == "module":
        return importlib.import_module(reference.location)
    path = reference.location
    # Tracebacks and triton.jit read the source through this cache.
    linecache.checkcache(path)
    digest = hashlib.sha256(path.encode(errors="surrogateescape")).hexdigest()[:12]
    name = f"_kernel_oracle_candidate_{digest}"
    loader = _FreshSourceLoader(name, path)
    spec = ModuleSpec(name, loader, origin=path)
    spec.has_location = True
    module = module_from_spec(spec)
    # Registered while it runs, as dataclasses and pickle expect.
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _import_failure(reference: CandidateReference, error: BaseException) -> str:
    location = reference.location
    if isinstance(error, ModuleNotFoundError) and _is_or_holds(error.name, location):
        return (
            f"candidate {reference.text!r}: there is no module {error.name!r}, neither in the"
            f" current folder {Path.cwd()} nor installed; for a file write"
            f" path/to/file.py:{reference.function}.{_own_package_hint(reference)}"
        )
    source = _source_file(reference)
    line = line_in(error, [str(source)] if source else [])
    message = f"{location} cannot be imported: {describe_exception(error)}" + (
        f" ({line})." if line else "."
    )
    if isinstance(error, ImportError) and "relative import" in str(error):
        message += " A file of a package is named as package.module:function."
    return message


def _is_or_holds(missing: str | None, module: str) -> bool:
    return missing is not None and (module + ".").startswith(missing + ".")


def _no_such_function(reference: CandidateReference, module: ModuleType) -> str:
    names = [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and callable(value)
        and getattr(value, "__module__", None) == module.__name__
    ]
    close = difflib.get_close_matches(reference.function, names, n=_NAMES_SHOWN)
    message = f"{reference.location} has no function {reference.function!r}; "
    if close:
        return message + f"did you mean {' or '.join(close)}?"
    if names:
        return (
            f"{message}it defines {', '.join(names[:_NAMES_SHOWN])}.{_own_package_hint(reference)}"
        )
    return f"{message}it defines no public function.{_own_package_hint(reference)}"


def _own_package_hint(reference: CandidateReference) -> str:
    top = reference.location.partition(".")[0]
    if reference.kind == "file" or top not in OWN_PACKAGES:
        return ""
    return f" ({top} means kernel-oracle's own package; a file of yours is ./{top}.py.)"


def _check_callable(name: str, function: object) -> None:
    kind = type(function)
    if kind.__module__.startswith("triton.runtime"):
        raise BadCandidate(
            f"{name} is a Triton kernel, which needs a grid to be launched; name the"
            " Python function that launches it."
        )
    if not callable(function):
        raise BadCandidate(
            f"{name} is no function: it is an object of type {kind.__name__}; name a"
            " function that takes and returns tensors."
        )


def _check_parameters(
    name: str,
    function: Any,
    parameters: Sequence[str],
    operator: str,
) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        # Some functions written in C have no signature; the call itself will tell.
        return
    try:
        signature.bind(*parameters)
    except TypeError:
        raise BadCandidate(
            f"{name} {_accepts(signature)}, but {operator} passes"
            f" {len(parameters)}: {', '.join(parameters)}."
        ) from None


def _accepts(signature: inspect.Signature) -> str:
    """Say how many positional arguments a signature takes."""
    values = signature.parameters.values()
    positional = [p for p in values if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = sum(p.default is p.empty for p in positional)
    keywords = [p.name for p in values if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    if any(p.kind is p.VAR_POSITIONAL for p in values):
        count = f"at least {required}"
    elif required < len(positional):
        count = f"{required} to {len(positional)}"
    else:
        count = str(required)
    plural = "" if count == "1" else "s"
    needs = f" and needs the keyword {', '.join(keywords)}" if keywords else ""
    return f"takes {count} positional parameter{plural}{needs}"
