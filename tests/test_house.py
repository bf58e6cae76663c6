"""The rules of the house: arrows point one way, no circles, nothing heavy where it does not belong."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("kernelband", "policies", "cluster")
DOORS = {"kernelband/api.py", "kernelband/cli.py"}


def imports(path: Path) -> set[str]:
    """Dotted names of all modules that a file imports, at any depth."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return found


def files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def tops(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports(path)}


def test_only_cluster_imports_ray():
    assert not [p for package in ("kernelband", "policies") for p in files(package) if "ray" in tops(p)]


def test_kernelband_knows_neither_policies_nor_cluster_but_at_its_doors():
    bad = [p for p in files("kernelband") if tops(p) & {"policies", "cluster"}
           and p.relative_to(ROOT).as_posix() not in DOORS]
    assert not bad


def test_policies_know_no_cluster_torch_or_triton():
    assert not [p for p in files("policies") if tops(p) & {"cluster", "torch", "triton", "ray"}]


def test_what_runs_beside_candidates_imports_nothing_of_ours():
    inside = files("kernelband/evaluate/inside")
    assert inside
    assert not [p for p in inside if tops(p) & set(PACKAGES)]


def test_no_circles_among_files():
    modules = {}
    for package in PACKAGES:
        for path in files(package):
            parts = path.relative_to(ROOT).with_suffix("").parts
            modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path

    def inner(name: str) -> set[str]:
        tree = ast.parse(modules[name].read_text())
        found = set()
        for node in tree.body:  # at module level only: an import inside of a function is no circle at load time
            if isinstance(node, ast.Import):
                found |= {a.name for a in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                found |= {f"{node.module}.{a.name}" for a in node.names} | {str(node.module)}
        return {f for f in found if f in modules and f != name}

    done: set[str] = set()

    def walk(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path[path.index(name):], name))
        if name in done:
            return
        for other in sorted(inner(name)):
            # A package's __init__ that re-exports its own parts is not a circle.
            if not name.startswith(other + ".") and not other.startswith(name + "."):
                walk(other, (*path, name))
        done.add(name)

    for module in modules:
        walk(module, ())


@pytest.mark.parametrize("module", ["kernelband", "kernelband.search", "kernelband.events", "kernelband.journal", "policies"])
def test_the_pure_core_loads_without_ray_torch_or_triton(module):
    code = (f"import sys, {module}; heavy = {{'ray', 'torch', 'triton'}} & set(sys.modules);"
            f"sys.exit(f'loaded {{heavy}}' if heavy else 0)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_no_file_is_too_long_to_own_one_thing():
    long = {p.relative_to(ROOT).as_posix(): n for package in PACKAGES for p in files(package)
            if (n := len(p.read_text().splitlines())) > 420}
    assert not long
