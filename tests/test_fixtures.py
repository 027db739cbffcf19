"""The golden fixtures: what is shipped is what is computed, and one changed bit is noticed."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import oracle

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"
FORWARD = "kv_rope.concat.forward"
FILE = f"{FORWARD}.safetensors"


def script(name: str) -> ModuleType:
    """Import a script of the fixtures folder under a name of its own."""
    spec = importlib.util.spec_from_file_location(f"_fixtures_{name}", FIXTURES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def made() -> tuple[dict[str, Any], dict[str, Any]]:
    """Manifest entries and golden tensors of all forward probes, computed now."""
    regenerate = script("regenerate")
    operator = oracle.find_operator(FORWARD)
    entries: dict[str, Any] = {FORWARD: {}}
    golden: dict[str, Any] = {FORWARD: {}}
    for case in operator.probes:
        entries[FORWARD][case.name], tensors = regenerate.certify(operator, case)
        golden[FORWARD].update(tensors)
    return entries, golden


@pytest.fixture
def copy(tmp_path: Path) -> tuple[ModuleType, Path]:
    """The script, looking at a copy of the fixtures that may be damaged."""
    regenerate = script("regenerate")
    for name in (FILE, "manifest.json"):
        shutil.copy(FIXTURES / name, tmp_path)
    regenerate.HERE = tmp_path  # type: ignore[attr-defined]
    return regenerate, tmp_path


def test_the_quick_check_of_what_is_shipped_is_green(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["regenerate.py", "--check", "--quick"])
    assert script("regenerate").main() == 0
    assert "are as shipped" in capsys.readouterr().out


def test_quick_without_check_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["regenerate.py", "--quick"])
    with pytest.raises(SystemExit, match="2"):
        script("regenerate").main()


def test_one_changed_bit_of_a_golden_tensor_is_found_and_named(
    copy: tuple[ModuleType, Path], made: tuple[Any, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    regenerate, folder = copy
    content = bytearray((folder / FILE).read_bytes())
    content[-2] ^= 1
    (folder / FILE).write_bytes(content)
    assert regenerate.check(*made) == 1
    message = capsys.readouterr().err
    assert f"{FILE} has SHA-256" in message
    assert "differs first at" in message


def test_one_changed_digit_of_the_manifest_is_found_and_named(
    copy: tuple[ModuleType, Path], made: tuple[Any, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    regenerate, folder = copy
    manifest = json.loads((folder / "manifest.json").read_text())
    digest = manifest["cases"][FORWARD]["ties"]["outputs"]["updated_key_cache"]
    wrong = ("0" if digest[0] != "0" else "1") + digest[1:]
    manifest["cases"][FORWARD]["ties"]["outputs"]["updated_key_cache"] = wrong
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert regenerate.check(*made) == 1
    assert f"{FORWARD} ties: outputs updated_key_cache" in capsys.readouterr().err


def test_a_damaged_or_missing_file_is_an_answer_not_a_traceback(
    copy: tuple[ModuleType, Path], made: tuple[Any, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    regenerate, folder = copy
    (folder / FILE).write_bytes(b"not safetensors")
    assert regenerate.check(*made) == 1
    assert "cannot be read" in capsys.readouterr().err
    (folder / FILE).unlink()
    assert regenerate.check(*made) == 1
    assert "is missing" in capsys.readouterr().err
    (folder / "manifest.json").unlink()
    assert regenerate.check(*made) == 1
    assert "is missing" in capsys.readouterr().err


def test_the_manifest_holds_every_case_with_every_element_certified() -> None:
    manifest = json.loads((FIXTURES / "manifest.json").read_text())
    for operator in oracle.all_operators().values():
        entries = manifest["cases"][operator.id]
        assert set(entries) == {case.name for case in operator.cases if not case.needs_gpu}
        assert all(entry["certified"] == entry["elements"] > 0 for entry in entries.values())


def test_the_shipped_tables_are_what_their_script_makes() -> None:
    tables = script("tables")
    assert tables.make() == tables.PATH.read_bytes()
