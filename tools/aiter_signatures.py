"""Extract what Headrace's adapters need to know of an aiter source tree: for each function they call, its arguments in
order and how many of them have no default. Parses, imports nothing (importing aiter without ROCm raises).

    pip download amd-aiter --no-deps -d /tmp/wheel && python -m zipfile -e /tmp/wheel/*.whl /tmp/tree
    python tools/aiter_signatures.py /tmp/tree --profile wheel --source "amd-aiter 0.1.7.post2.dev18 (PyPI)"

replaces one profile of tests/kernels/aiter/signatures.json. The tree is a checkout of ROCm/aiter or an unpacked wheel.
"""

import argparse
import ast
import json
import sys
from pathlib import Path

from headrace.kernels.aiter_library import FUNCTIONS

TABLE = Path(__file__).resolve().parent.parent / "tests/kernels/aiter/signatures.json"
MOVED = {
    "aiter.ops.triton.fp8_mqa_logits": "aiter.ops.triton.attention.fp8_mqa_logits",
    "aiter.ops.triton.pa_mqa_logits": "aiter.ops.triton.attention.pa_mqa_logits",
}
"""Modules that newer trees keep elsewhere, with the old name as an alias"""


def signature(tree: Path, module: str, name: str) -> dict[str, object]:
    """Raises SystemExit when the tree has no such function."""
    for candidate in (module, MOVED.get(module, module)):
        path = tree / (candidate.replace(".", "/") + ".py")
        if not path.exists():
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name == name:
                given = node.args
                if given.vararg or given.kwarg:
                    raise SystemExit(f"{path}: {name} takes * or **: read it by hand")
                plain = [a.arg for a in (*given.posonlyargs, *given.args)]
                required = plain[: len(plain) - len(given.defaults)]
                required += [a.arg for a, default in zip(given.kwonlyargs, given.kw_defaults) if default is None]
                return {
                    "module": candidate,
                    "arguments": plain + [a.arg for a in given.kwonlyargs],
                    "required": required,
                }
    raise SystemExit(f"{tree} has no {module}.{name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", type=Path, help="folder that holds the `aiter` package")
    parser.add_argument("--profile", required=True, help="name in the table, e.g. wheel")
    parser.add_argument("--source", required=True, help="what the tree is: version or commit")
    given = parser.parse_args()
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    functions = {name: signature(given.tree, module, name) for name, module in FUNCTIONS.items()}
    table[given.profile] = {"source": given.source, "functions": functions}
    TABLE.parent.mkdir(parents=True, exist_ok=True)
    TABLE.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    print(f"{len(functions)} signatures into {TABLE}", file=sys.stderr)


if __name__ == "__main__":
    main()
