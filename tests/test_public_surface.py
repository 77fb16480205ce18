"""What is public, what importing it costs, and who may import what."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import fuel_core
from fuel_core.checkpoint import published

ROOT = Path(__file__).resolve().parent.parent
CORE = ROOT / "fuel_core"
PLUGINS = sorted([*ROOT.glob("plugins/fuel-*/fuel_*"), *ROOT.glob("examples/fuel-*/fuel_*")])


def _imports(path: Path) -> Iterator[tuple[str, str | None]]:
    """(module, name) of every absolute import in a file, wherever it stands; name None for `import module`."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            yield from ((node.module, alias.name) for alias in node.names)


def test_importing_the_core_imports_no_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import sys, fuel_core; print(sorted({'torch', 'numpy', 'gguf'} & set(sys.modules)))"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == "[]\n"


def test_every_name_in_all_is_there_once_and_can_be_used() -> None:
    # The order is the linter's business (RUF022).
    names = list(fuel_core.__all__)
    assert len(names) == len(set(names))
    for name in names:
        assert getattr(fuel_core, name) is not None


def test_dir_shows_the_public_names_and_an_unknown_one_is_an_attribute_error() -> None:
    assert set(fuel_core.__all__) <= set(dir(fuel_core))
    with pytest.raises(AttributeError, match="no_such_name"):
        fuel_core.no_such_name  # noqa: B018


def test_type_checkers_see_the_same_public_names_as_callers() -> None:
    # The lazy table and the TYPE_CHECKING imports say the same thing twice; they must not drift apart.
    tree = ast.parse((CORE / "__init__.py").read_text())
    (block,) = [n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    seen = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert set(seen) == set(fuel_core.__all__)
    for name, module in seen.items():
        assert module is not None
        if module != "fuel_core":
            assert getattr(importlib.import_module(module), name) is getattr(fuel_core, name)


def test_layers_and_errors_have_a_sorted_public_list_that_exists() -> None:
    for name in ("fuel_core.layers", "fuel_core.errors"):
        module = importlib.import_module(name)
        assert list(module.__all__) == sorted(module.__all__)
        for public in module.__all__:
            assert hasattr(module, public)


def test_every_error_is_drawn_in_the_tree_of_the_errors_module() -> None:
    errors = importlib.import_module("fuel_core.errors")
    drawn = set(re.findall(r"\b(?:\w+Error|TopologyChanged)\b", errors.__doc__ or ""))
    assert drawn == set(errors.__all__)


def test_core_never_imports_a_plugin() -> None:
    names = {plugin.name for plugin in PLUGINS}
    assert names
    for path in [*CORE.rglob("*.py"), *(ROOT / "tests").glob("*.py")]:
        for module, _ in _imports(path):
            assert module.partition(".")[0] not in names, f"{path.relative_to(ROOT)} imports {module}"


def test_core_names_no_family() -> None:
    families = re.compile(r"llama|qwen|gemma|mistral|smollm|\bphi[-_0-9]", re.IGNORECASE)
    for path in CORE.rglob("*.py"):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            assert not families.search(line), f"{path.relative_to(ROOT)}:{number}: {line.strip()}"


def test_published_families_are_listed_with_the_names_that_their_packages_claim() -> None:
    listed = published.table("families")
    released = [plugin for plugin in PLUGINS if plugin.parent.parent.name == "plugins"]
    for plugin in released:
        project = tomllib.loads((plugin.parent / "pyproject.toml").read_text())["project"]
        claims = project["entry-points"]
        assert listed[project["name"]] == {
            "model_types": sorted(claims["fuel_core.model_types"]),
            "gguf_architectures": sorted(claims["fuel_core.gguf_architectures"]),
        }
    assert len(listed) == len(released)


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda path: path.name)
def test_plugin_imports_only_public_names_and_no_other_plugin(plugin: Path) -> None:
    public = {
        "fuel_core": set(fuel_core.__all__),
        "fuel_core.layers": set(fuel_core.layers.__all__),
        "fuel_core.errors": set(fuel_core.errors.__all__),
        "fuel_core.testing": set(importlib.import_module("fuel_core.testing").__all__),
    }
    if "testing" in fuel_core.__all__:
        public["fuel_core.testing"] = set(fuel_core.testing.__all__)
    others = {other.name for other in PLUGINS} - {plugin.name}
    for path in plugin.rglob("*.py"):
        for module, name in _imports(path):
            where = f"{path.relative_to(ROOT)} imports {name or ''} from {module}"
            assert module.partition(".")[0] not in others, where
            if module.partition(".")[0] == "fuel_core":
                assert module in public, where
                assert name is None or name in public[module], where
