"""What importing the package costs, what it offers, and what it keeps apart."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import oracle

ROOT = Path(oracle.__file__).resolve().parent.parent


def in_a_fresh_process(source: str, folder: Path) -> str:
    completed = subprocess.run(
        [sys.executable, "-c", source], cwd=folder, capture_output=True, text=True, check=True
    )
    return completed.stdout.strip()


def test_importing_oracle_and_fast_imports_nothing_heavy(tmp_path: Path) -> None:
    source = (
        "import sys; import oracle, fast;"
        "print([name for name in ('torch', 'triton', 'numpy', 'click', 'rich')"
        " if name in sys.modules])"
    )
    assert in_a_fresh_process(source, tmp_path) == "[]"


@pytest.mark.parametrize("name", oracle.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(oracle, name) is not None
    assert name in dir(oracle)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = oracle.no_such_name  # type: ignore[attr-defined]


def test_truth_stays_a_function_whatever_was_imported_before(tmp_path: Path) -> None:
    source = (
        "import oracle.certified, oracle.comparison; import oracle; print(callable(oracle.truth))"
    )
    assert in_a_fresh_process(source, tmp_path) == "True"


@pytest.mark.parametrize(("package", "other"), [("oracle", "fast"), ("fast", "oracle")])
def test_a_kernel_and_its_judge_share_no_code(package: str, other: str) -> None:
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            assert not any(name.partition(".")[0] == other for name in names), path


def test_modules_import_their_own_package_relatively() -> None:
    examples = ROOT / "oracle" / "examples"
    for package in ("oracle", "fast"):
        for path in (ROOT / package).rglob("*.py"):
            if path.is_relative_to(examples):
                continue  # written as users write: from outside
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.ImportFrom) and node.level == 0:
                    assert (node.module or "").partition(".")[0] != package, path
