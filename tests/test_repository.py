"""Rules of the whole tree: size budgets, who may import whom, what stays free of torch, no hidden switches."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("kernels", "kvstore", "model", "prefill", "decode", "router", "lab", "deploy")
LEVEL = {"": 0, "kernels": 1, "kvstore": 2, "model": 3, "prefill": 4, "decode": 4, "router": 4, "lab": 5, "deploy": 6}
MODEL_MAY_IMPORT_OF_KVSTORE = ("headrace.kvstore.pool", "headrace.kvstore.layout")
TENSOR_SIDE_OF_KVSTORE = ("headrace.kvstore.pool", "headrace.kvstore.transfer", "headrace.kvstore.copiers")
TORCH_FREE_ROOMS = ("kvstore", "router", "deploy")
HEAVY = ("torch", "triton", "ray", "transformers")
FILE_LINES, TEST_FILE_LINES, FUNCTION_LINES, KERNEL_LINES = 400, 500, 60, 120
ENVIRONMENT_READERS = {
    "deploy/launchers/process.py": "children inherit the environment",
    "deploy/launchers/ray.py": "Ray is configured by variables only",
    "deploy/runner.py": "PYTHONPATH for children with another working directory",
    "deploy/rundir.py": "the sentinel inherits the environment",
}


def sources(*folders: str) -> Iterator[Path]:
    """Python files under the folders. Links are not followed: the rooms are visited where they really are."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.resolve() == path and "__pycache__" not in path.parts:
                yield path


def package_sources() -> Iterator[tuple[str, Path]]:
    """(room or "", file) of the whole package."""
    yield from (
        ("", path) for path in sources("src/headrace") if path.relative_to(ROOT / "src/headrace").parts[0] not in ROOMS
    )
    for room in ROOMS:
        yield from ((room, path) for path in sources(room))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def module_name(room: str, path: Path) -> str:
    inner = path.relative_to(ROOT / (room or "src/headrace")).with_suffix("").parts
    parts = ["headrace", *([room] if room else []), *inner]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def waivers() -> dict[str, str]:
    lines = (ROOT / "tests/budget_waivers.txt").read_text().splitlines()
    found = dict(line.split(maxsplit=1) for line in lines if line.strip() and not line.startswith("#"))
    assert all(reason.strip() for reason in found.values())
    return found


def test_files_and_functions_stay_small() -> None:
    over = {}
    everything = [path for _, path in package_sources()] + list(sources("tests", "examples", "tools"))
    for path in everything:
        name, text = relative(path), path.read_text()
        lines = text.count("\n")
        if lines > (TEST_FILE_LINES if name.startswith("tests/") else FILE_LINES):
            over[name] = f"{lines} lines"
        limit = KERNEL_LINES if name.startswith("kernels/") else FUNCTION_LINES
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > limit:
                    over[f"{name}:{node.name}"] = f"{length} lines, limit {limit}"
    allowed = waivers()
    assert {name: why for name, why in over.items() if name not in allowed} == {}
    assert set(allowed) - set(over) == set(), "waivers that are no longer needed"


def imports_of(path: Path) -> Iterator[str]:
    """Names of headrace modules that a file imports, also inside functions; type-checking imports count too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            if node.module.split(".")[0] == "headrace":
                # `from headrace.kvstore import pool` names a module as well as `from headrace.kvstore.pool import x`
                if node.module in ("headrace", *(f"headrace.{room}" for room in ROOMS)):
                    yield from (f"{node.module}.{alias.name}" for alias in node.names)
                else:
                    yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "headrace")


def test_imports_go_downwards_only() -> None:
    wrong = []
    for room, path in package_sources():
        for target in imports_of(path):
            part = ([*target.split("."), ""])[1]
            other = part if part in ROOMS else ""
            if other == room:
                continue
            fine = LEVEL[other] < LEVEL[room]
            if room == "model" and other == "kvstore":
                fine = target.startswith(MODEL_MAY_IMPORT_OF_KVSTORE)
            if not fine:
                wrong.append(f"{relative(path)} imports {target}")
    assert wrong == []


def test_no_relative_imports() -> None:
    for _, path in package_sources():
        for node in ast.walk(ast.parse(path.read_text())):
            assert not (isinstance(node, ast.ImportFrom) and node.level), relative(path)


def test_rooms_have_no_init_of_their_own() -> None:
    assert [room for room in ROOMS if (ROOT / room / "__init__.py").exists()] == []


def test_rooms_are_linked_into_the_package() -> None:
    for room in ROOMS:
        link = ROOT / "src/headrace" / room
        if (ROOT / room).exists():
            assert link.is_symlink()
            assert link.resolve() == ROOT / room


def test_what_must_stay_light_imports_no_torch() -> None:
    modules = []
    for room, path in package_sources():
        name = module_name(room, path)
        if room in ("", *TORCH_FREE_ROOMS) and not name.startswith(TENSOR_SIDE_OF_KVSTORE):
            modules.append(name)
    modules = [name for name in modules if name not in OPTIONAL_HEAVY]
    program = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        f"    bad = [m for m in {HEAVY!r} if m in sys.modules]\n"
        "    assert not bad, f'{name} imports {bad}'\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr


OPTIONAL_HEAVY = ("headrace.deploy.commands.generate",)
"""Commands that are an engine themselves."""


def test_the_kernels_folder_shadows_nothing_from_the_repository_root() -> None:
    program = (
        "import importlib.util as u\n"
        "spec = u.find_spec('kernels')\n"
        "print('none' if spec is None else spec.origin or 'namespace')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    # A package of that name may be installed, in an environment below the root too.
    assert not done.stdout.startswith(str(ROOT / "kernels"))


def test_a_regular_kernels_package_wins_over_the_folder(tmp_path: Path) -> None:
    package = tmp_path / "kernels"
    package.mkdir()
    (package / "__init__.py").write_text("WHO = 'hub'\n")
    program = f"import sys; sys.path.insert(1, {str(tmp_path)!r}); import kernels; print(kernels.WHO)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "hub", done.stderr


def reads_environment(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
        return node.attr in ("environ", "getenv", "environb")
    return isinstance(node, ast.ImportFrom) and node.module == "os" and any("env" in a.name for a in node.names)


def test_no_switch_hides_in_the_environment() -> None:
    found = set()
    for room, path in package_sources():
        if "train" in path.parts or path.name.startswith("fake") or room == "lab":
            continue
        if any(reads_environment(node) for node in ast.walk(ast.parse(path.read_text()))):
            found.add(relative(path))
    assert found - set(ENVIRONMENT_READERS) == set()


def test_every_room_says_what_it_is_for() -> None:
    missing = [room for room in ROOMS if any(sources(room)) and not (ROOT / room / "README.md").exists()]
    assert missing == []


@pytest.mark.parametrize("name", ["README.md", "docs/architecture.md", "docs/operations.md"])
def test_links_in_the_documents_lead_somewhere(name: str) -> None:
    document = ROOT / name
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), f"{name}: {target}"


def test_the_console_script_is_declared() -> None:
    assert 'headrace = "headrace.cli:main"' in (ROOT / "pyproject.toml").read_text()
