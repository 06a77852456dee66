"""The router starts without torch and everything that drags it in."""

import subprocess
import sys

CODE = """
import pkgutil, sys, importlib, headrace
root = headrace.__path__[0] + "/router"
for found in pkgutil.walk_packages([root], "headrace.router."):
    importlib.import_module(found.name)
heavy = {"torch", "triton", "ray", "transformers"} & set(sys.modules)
assert not heavy, heavy
print(len([m for m in sys.modules if m.startswith("headrace.router")]))
"""


def test_no_torch_in_the_router() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 25
