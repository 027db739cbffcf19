from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from oracle import candidate
from oracle.candidate import (
    BadCandidate,
    CandidateReference,
    describe_exception,
    import_path,
    line_in,
    load_candidate,
    parse_candidate,
    uses_triton,
)

NAMES = ("key_states", "value_states")


@pytest.fixture(autouse=True)
def restored_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Work in an empty folder, and forget what was imported from it."""
    monkeypatch.chdir(tmp_path)
    path, modules = list(sys.path), set(sys.modules)
    yield
    assert sys.path == path
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


def write(path: Path, source: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(source))
    return path


def load(text: str, names: tuple[str, ...] = NAMES) -> Callable[..., object]:
    return load_candidate(parse_candidate(text), names, "kv_rope.concat.forward")


class TestParsing:
    def test_a_module(self) -> None:
        expected = CandidateReference("fast.kv_rope:forward", "module", "fast.kv_rope", "forward")
        assert parse_candidate("fast.kv_rope:forward") == expected

    @pytest.mark.parametrize("text", ["kernel.py", "./kernel.py", "a b/../kernel.py"])
    def test_a_file_becomes_an_absolute_path(self, tmp_path: Path, text: str) -> None:
        write(tmp_path / "kernel.py", "")
        (tmp_path / "a b").mkdir()
        reference = parse_candidate(f"{text}:forward")
        assert (reference.kind, reference.function) == ("file", "forward")
        assert Path(reference.location).is_absolute()
        assert Path(reference.location).samefile(tmp_path / "kernel.py")

    def test_the_last_colon_separates(self, tmp_path: Path) -> None:
        write(tmp_path / "a:b" / "kernel.py", "")
        assert parse_candidate("a:b/kernel.py:f").location == str(tmp_path / "a:b" / "kernel.py")

    def test_a_home_folder_is_expanded(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        write(tmp_path / "kernel.py", "")
        assert parse_candidate("~/kernel.py:f").location == str(tmp_path / "kernel.py")

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("kernel", "candidate 'kernel' has no ':function'; write package.module:function or"),
            ("", "has no ':function'"),
            (":f", "names no module or file"),
            ("kernel:", "'' is not a function's name"),
            ("kernel:f()", r"'f\(\)' is not a function's name"),
            ("kernel:a.b-c", "'a.b-c' is not a function's name"),
            ("my-kernel:f", r"'my-kernel' is not a module's name; .* as in \./my-kernel\.py:f"),
            ("a..b:f", r"'a\.\.b' is not a module's name"),
            (".kernel:f", r"is not a module's name"),
            ("missing.py:f", r"there is no file .*/missing\.py; check the path"),
            ("folder/missing.py:f", r"there is no file .*/folder/missing\.py"),
            ("folder/:f", r"/folder is a folder; .* as in folder/kernel\.py:function"),
            ("folder/kernel:f", r"there is no file .*; did you mean .*/folder/kernel\.py\?"),
            (
                "folder/kernel.py",
                r"write folder/kernel\.py:forward\. Its functions: forward, backward\.",
            ),
            ("folder/broken.py", r"write folder/broken\.py:NAME\.$"),
        ],
    )
    def test_what_cannot_be_meant_is_told_with_what_to_write(
        self, tmp_path: Path, text: str, message: str
    ) -> None:
        source = "def _helper(): pass\ndef forward(): pass\ndef backward(): pass"
        write(tmp_path / "folder" / "kernel.py", source)
        write(tmp_path / "folder" / "broken.py", "def (")
        with pytest.raises(BadCandidate, match=message) as caught:
            parse_candidate(text)
        assert repr(text) in str(caught.value)
        assert caught.value.output_text == ""


class TestUsesTriton:
    @pytest.mark.parametrize(
        "source",
        [
            "import triton",
            "import triton.language as tl",
            "from triton import jit",
            "from triton.language import load",
            "def f():\n    import triton",
            "@triton.jit\ndef kernel(): pass",
        ],
    )
    def test_seen_in_a_file(self, tmp_path: Path, source: str) -> None:
        write(tmp_path / "kernel.py", source)
        assert uses_triton(parse_candidate("kernel.py:f"))

    @pytest.mark.parametrize(
        "source",
        [
            "import torch",
            "# triton.jit",
            "'''triton.jit'''",
            "import tritonish",
            "from .triton import jit",
            "raise RuntimeError('imported')",
            "def (",
            "\0",
        ],
    )
    def test_not_seen_where_it_is_not_used(self, tmp_path: Path, source: str) -> None:
        write(tmp_path / "kernel.py", source)
        assert not uses_triton(parse_candidate("kernel.py:f"))

    def test_a_module_is_found_without_importing_its_packages(self, tmp_path: Path) -> None:
        write(tmp_path / "outer" / "__init__.py", "raise RuntimeError('imported')")
        write(tmp_path / "outer" / "inner" / "kernel.py", "import triton")
        write(tmp_path / "outer" / "plain.py", "import torch")
        assert uses_triton(parse_candidate("outer.inner.kernel:f"))
        assert not uses_triton(parse_candidate("outer.plain:f"))

    def test_our_own_module_is_found_though_a_file_has_its_name(self, tmp_path: Path) -> None:
        write(tmp_path / "fast.py", "")
        write(tmp_path / "oracle.py", "import triton")
        assert uses_triton(parse_candidate("fast.kv_rope:f"))
        assert not uses_triton(parse_candidate("oracle:f"))

    @pytest.mark.parametrize(
        "text",
        ["nowhere:f", "nowhere.kernel:f", "textwrap.kernel:f", "sys:f", "no_spec:f", "fast.no:f"],
    )
    def test_no_source_means_no(self, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "no_spec", ModuleType("no_spec"))
        assert not uses_triton(parse_candidate(text))

    @pytest.mark.parametrize(
        ("files", "text"),
        [
            ({"kernel.py": "from kernels import k", "kernels.py": "import triton"}, "kernel.py:f"),
            ({"kernel.py": "from kernels import k", "kernels.py": "import triton"}, "kernel:f"),
            ({"kernel.py": "import a.b", "a/b.py": "import triton"}, "kernel.py:f"),
            (
                {"kernel.py": "import a.b", "a/__init__.py": "import triton", "a/b.py": ""},
                "kernel.py:f",
            ),
            ({"kernel.py": "def f():\n    import a", "a.py": "import triton"}, "kernel.py:f"),
            (
                {
                    "kernel.py": "from a import k",
                    "a/__init__.py": "from .b import k",
                    "a/b.py": "from ..c import k",
                    "c.py": "import triton",
                },
                "kernel.py:f",
            ),
            (
                {"p/kernel.py": "from .kernels import k", "p/kernels.py": "import triton"},
                "p.kernel:f",
            ),
            (
                {"p/kernel.py": "from . import kernels", "p/kernels.py": "import triton"},
                "p.kernel:f",
            ),
            ({"p/kernel.py": "from . import k", "p/__init__.py": "import triton"}, "p.kernel:f"),
            ({"p/kernel.py": "from p.k import k", "p/k.py": "import triton"}, "p.kernel:f"),
            ({"p/q/kernel.py": "from ..k import k", "p/k.py": "import triton"}, "p.q.kernel:f"),
            ({"p/__init__.py": "from .k import *", "p/k.py": "import triton"}, "p:f"),
            ({"p/kernel.py": "import k", "k.py": "import triton"}, "p.kernel:f"),
        ],
    )
    def test_seen_in_the_candidates_own_modules(
        self, tmp_path: Path, files: dict[str, str], text: str
    ) -> None:
        for name, source in files.items():
            write(tmp_path / name, source)
        assert uses_triton(parse_candidate(text))
        for name, source in files.items():
            write(tmp_path / name, source.replace("import triton", ""))
        assert not uses_triton(parse_candidate(text))

    @pytest.mark.parametrize("test", ["TYPE_CHECKING", "typing.TYPE_CHECKING"])
    def test_what_only_type_checkers_import_is_not_used(self, tmp_path: Path, test: str) -> None:
        write(tmp_path / "kernels.py", "import triton")
        source = f"if {test}:\n    import triton\n    import kernels\nelse:\n    "
        write(tmp_path / "kernel.py", source + "import torch")
        assert not uses_triton(parse_candidate("kernel.py:f"))
        write(tmp_path / "kernel.py", source + "import kernels")
        assert uses_triton(parse_candidate("kernel.py:f"))

    def test_a_package_is_not_read_on_the_way_to_a_module_in_it(self, tmp_path: Path) -> None:
        write(tmp_path / "package" / "__init__.py", "import triton")
        write(tmp_path / "package" / "plain.py", "import torch")
        write(tmp_path / "kernel.py", "from package.plain import f")
        assert not uses_triton(parse_candidate("kernel.py:f"))
        assert not uses_triton(parse_candidate("package.plain:f"))

    @pytest.mark.parametrize("name", ["numpy_like", "oracle", "fast"])
    def test_other_packages_are_not_read(
        self, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        library = tmp_path / "library"
        write(library / name / "__init__.py", "import triton")
        write(library / "candidate.py", f"from {name} import k\nfrom .{name} import k")
        write(tmp_path / "folder" / "kernel.py", f"from {name} import k\nfrom ..{name} import k")
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(library))
            assert not uses_triton(parse_candidate("folder/kernel.py:f"))
            assert not uses_triton(parse_candidate("candidate:f"))

    def test_an_installed_candidates_own_package_is_read(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        library = tmp_path / "library"
        write(library / "installed" / "kernel.py", "from .k import k")
        write(library / "installed" / "k.py", "import installed.j")
        write(library / "installed" / "j.py", "import triton")
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(library))
            assert uses_triton(parse_candidate("installed.kernel:f"))

    @pytest.mark.parametrize("name", ["oracle", "fast"])
    def test_our_own_packages_are_libraries_to_a_candidate(self, tmp_path: Path, name: str) -> None:
        write(tmp_path / name / "__init__.py", "import triton")
        write(tmp_path / "kernel.py", f"import {name}")
        assert not uses_triton(parse_candidate("kernel.py:f"))
        assert not uses_triton(parse_candidate("kernel:f"))

    def test_modules_that_import_each_other_are_read_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write(tmp_path / "package" / "__init__.py", "from . import a, b\nfrom .again import a")
        write(tmp_path / "package" / "a.py", "from . import b\nimport package.b")
        write(tmp_path / "package" / "b.py", "from . import a\nfrom package import a, b, c")
        # Names without end for the same files.
        (tmp_path / "package" / "again").symlink_to(tmp_path / "package")
        read, read_bytes = [], Path.read_bytes

        def noted(path: Path) -> bytes:
            read.append(path.name)
            return read_bytes(path)

        monkeypatch.setattr(Path, "read_bytes", noted)
        assert not uses_triton(parse_candidate("package:f"))
        assert sorted(read) == ["__init__.py", "a.py", "b.py"]

    def test_a_module_that_cannot_be_parsed_hides_no_other(self, tmp_path: Path) -> None:
        write(tmp_path / "broken.py", "def (")
        write(tmp_path / "good.py", "import triton")
        write(tmp_path / "kernel.py", "import good, broken, nowhere")
        assert uses_triton(parse_candidate("kernel.py:f"))
        write(tmp_path / "kernel.py", "import broken, good, nowhere")
        assert uses_triton(parse_candidate("kernel.py:f"))

    def test_a_file_that_is_gone_means_no(self, tmp_path: Path) -> None:
        path = write(tmp_path / "kernel.py", "import triton")
        reference = parse_candidate("kernel.py:f")
        path.unlink()
        assert not uses_triton(reference)


class TestLoading:
    def test_a_file_is_loaded_under_a_private_name(self, tmp_path: Path) -> None:
        write(tmp_path / "json.py", "from dataclasses import dataclass\n\ndef f(a, b): return a")
        import json

        function = load("json.py:f")
        assert function(1, 2) == 1
        assert function.__module__.startswith("_kernel_oracle_candidate_")
        assert function.__module__ in sys.modules
        assert sys.modules["json"] is json

    def test_dataclasses_with_deferred_annotations_work_in_a_file(self, tmp_path: Path) -> None:
        source = """
            from __future__ import annotations
            from dataclasses import dataclass

            @dataclass
            class Config:
                size: int = 4

            def f(a, b): return Config().size
        """
        write(tmp_path / "kernel.py", source)
        assert load("kernel.py:f")(1, 2) == 4

    def test_a_file_is_read_anew_each_time(self, tmp_path: Path) -> None:
        for value in (1, 2, 3):
            write(tmp_path / "kernel.py", f"def f(a, b): return {value}")
            assert load("kernel.py:f")(0, 0) == value
        assert not (tmp_path / "__pycache__").exists()

    def test_siblings_of_a_file_are_importable_while_it_loads(self, tmp_path: Path) -> None:
        write(tmp_path / "folder" / "sibling_of_kernel.py", "value = 5")
        source = "import sibling_of_kernel\ndef f(a, b): return sibling_of_kernel.value"
        write(tmp_path / "folder" / "kernel.py", source)
        assert load("folder/kernel.py:f")(0, 0) == 5
        assert str(tmp_path / "folder") not in sys.path

    def test_a_module_in_the_current_folder_comes_first(self, tmp_path: Path) -> None:
        write(tmp_path / "antigravity.py", "def f(a, b): return 'local'")
        assert load("antigravity:f")(0, 0) == "local"

    def test_a_file_named_like_our_package_does_not_shadow_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write(tmp_path / "fast.py", "def f(a, b): return 'theirs'")
        for name in [name for name in sys.modules if name.partition(".")[0] == "fast"]:
            monkeypatch.delitem(sys.modules, name)
        with pytest.raises(BadCandidate, match=r"fast means kernel-oracle's own.*\./fast\.py"):
            load("fast:f")
        with pytest.raises(BadCandidate, match=r"fast means kernel-oracle's own.*\./fast\.py"):
            load("fast.nothing:f")
        assert load("fast.py:f")(0, 0) == "theirs"
        # Importing ours brought it under its own name.
        assert (
            Path(str(sys.modules["fast"].__file__)).parent.parent
            == Path(candidate.__file__).parent.parent
        )

    def test_the_import_path_is_restored_though_the_candidate_replaced_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write(tmp_path / "kernel.py", "")
        monkeypatch.setattr(sys, "path", list(sys.path))
        before = sys.path
        with import_path(parse_candidate("kernel.py:f")):
            sys.path = []
        assert sys.path == []
        sys.path = before
        sys.path.remove(str(tmp_path))

    @pytest.mark.parametrize(
        ("source", "message"),
        [
            (
                "import torch\nimport no_such_library",
                r"imported: ModuleNotFoundError: No module named .* \(.*/kernel\.py:2\)\.$",
            ),
            ("\n\nx = 1 +", r"kernel\.py cannot be imported: SyntaxError: .* \(.*kernel\.py:3\)"),
            ("import json\njson.loads('{')", r"JSONDecodeError: .* \(.*/kernel\.py:2\)"),
            ("raise SystemExit(3)", r"cannot be imported: SystemExit: 3 \(.*kernel\.py:1\)"),
            ("raise BaseException", r"cannot be imported: BaseException \("),
            ("from .sibling import x", r"relative import.*named as package\.module:function"),
            ("\0", r"cannot be imported: SyntaxError"),
        ],
    )
    def test_an_import_that_fails_is_told_with_its_line(
        self, tmp_path: Path, source: str, message: str
    ) -> None:
        write(tmp_path / "kernel.py", source)
        with pytest.raises(BadCandidate, match=message):
            load("kernel.py:f")
        assert not [name for name in sys.modules if name.startswith("_kernel_oracle_candidate_")]

    def test_an_interrupt_during_an_import_is_the_users(self, tmp_path: Path) -> None:
        write(tmp_path / "kernel.py", "raise KeyboardInterrupt")
        with pytest.raises(KeyboardInterrupt):
            load("kernel.py:f")

    @pytest.mark.parametrize("text", ["nowhere:f", "nowhere.at.all:f", "package.missing:f"])
    def test_a_missing_module_is_told_with_where_it_was_looked_for(
        self, tmp_path: Path, text: str
    ) -> None:
        write(tmp_path / "package" / "__init__.py", "")
        with pytest.raises(BadCandidate, match=rf"neither in the current folder {tmp_path} nor"):
            load(text)

    def test_a_module_that_a_module_misses_is_not_taken_for_it(self, tmp_path: Path) -> None:
        write(tmp_path / "package" / "kernel.py", "import nowhere_else")
        with pytest.raises(BadCandidate, match=r"No module named 'nowhere_else' \(.*kernel\.py:1"):
            load("package.kernel:f")

    @pytest.mark.parametrize(
        ("function", "message"),
        [
            ("forwrad", r"has no function 'forwrad'; did you mean forward\?$"),
            ("zzz", r"it defines forward, backward, b1, b2, b3\.$"),
            ("path", r"kernel\.py:path is no function: it is an object of type module"),
            ("number", r"is no function: it is an object of type int"),
            ("nothing", r"has no function 'nothing'"),
        ],
    )
    def test_a_function_that_is_not_there(
        self, tmp_path: Path, function: str, message: str
    ) -> None:
        source = """
            from os import path, getcwd
            number = 3
            nothing = None

            def forward(a, b): pass
            def backward(a, b): pass
            def b1(a, b): pass
            def b2(a, b): pass
            def b3(a, b): pass
            def b4(a, b): pass
            def _zzz(a, b): pass
        """
        write(tmp_path / "kernel.py", source)
        with pytest.raises(BadCandidate, match=message):
            load(f"kernel.py:{function}")

    def test_a_file_without_functions(self, tmp_path: Path) -> None:
        write(tmp_path / "kernel.py", "x = 1")
        with pytest.raises(BadCandidate, match="it defines no public function"):
            load("kernel.py:f")

    def test_a_module_attribute_that_raises(self, tmp_path: Path) -> None:
        write(tmp_path / "kernel.py", "def __getattr__(name): raise OSError(name)")
        with pytest.raises(BadCandidate, match="OSError: f"):
            load("kernel.py:f")

    def test_a_triton_kernel_is_not_what_is_called(self, tmp_path: Path) -> None:
        # As triton.jit makes one; a real one is met in test_server, in a process of its own.
        source = """
            class JITFunction:
                __module__ = "triton.runtime.jit"

                def __call__(self, *args): raise RuntimeError("no grid")

            kernel = JITFunction()
        """
        write(tmp_path / "kernel.py", source)
        with pytest.raises(BadCandidate, match=r"is a Triton kernel.*function that launches it"):
            load("kernel.py:kernel")

    @pytest.mark.parametrize(
        ("parameters", "accepts"),
        [
            ("", "takes 0 positional parameters"),
            ("a", "takes 1 positional parameter"),
            ("a, b, c", "takes 3 positional parameters"),
            ("a, b, c, d=0", "takes 3 to 4 positional parameters"),
            ("a=0", "takes 0 to 1 positional parameters"),
            ("a, b, c, *rest", "takes at least 3 positional parameters"),
            ("a, b, *, eps", "takes 2 positional parameters and needs the keyword eps"),
        ],
    )
    def test_a_wrong_number_of_parameters(
        self, tmp_path: Path, parameters: str, accepts: str
    ) -> None:
        write(tmp_path / "kernel.py", f"def f({parameters}): pass")
        with pytest.raises(BadCandidate) as caught:
            load("kernel.py:f")
        expected = (
            f"kernel.py:f {accepts}, but kv_rope.concat.forward passes 2: key_states, value_states."
        )
        assert str(caught.value) == expected

    @pytest.mark.parametrize("parameters", ["a, b", "a, b=1, c=2", "*all", "a, /, b, *, c=1"])
    def test_parameters_that_fit(self, tmp_path: Path, parameters: str) -> None:
        write(tmp_path / "kernel.py", f"def f({parameters}): return 9")
        assert load("kernel.py:f")(1, 2) == 9

    def test_a_signature_that_cannot_be_read_is_let_through(self, tmp_path: Path) -> None:
        write(tmp_path / "kernel.py", "f = max")
        assert load("kernel.py:f")(1, 2) == 2


class TestDescribing:
    def test_the_innermost_line_in_the_files(self, tmp_path: Path) -> None:
        path = write(tmp_path / "kernel.py", "import json\ndef f(a, b):\n    json.loads(a)\n")
        function = load("kernel.py:f")
        with pytest.raises(ValueError, match="Expecting") as caught:
            function("{", 0)
        assert line_in(caught.value, [str(path)]) == f"{path}:3"
        assert line_in(caught.value, []).startswith(str(Path(sys.modules["json"].__file__ or "")
                                                        .parent))  # fmt: skip

    def test_no_line_where_there_is_no_traceback(self) -> None:
        assert line_in(ValueError("x"), ["kernel.py"]) == ""

    @pytest.mark.parametrize(
        ("error", "text"),
        [
            (ValueError("a\n  b"), "ValueError: a b"),
            (ValueError(), "ValueError"),
            (ValueError("x" * 501), "ValueError: " + "x" * 500 + "..."),
            (ValueError("x" * 500), "ValueError: " + "x" * 500),
        ],
    )
    def test_an_exception_on_one_line(self, error: Exception, text: str) -> None:
        assert describe_exception(error) == text
