#!/bin/sh
# Creates .venv and installs Headrace into it. A stamp holds a digest of pyproject.toml and of this file: while they are
# unchanged there is nothing to do. torch comes first, so that a CPU build that is already there or asked for is kept.
set -eu
cd "$(dirname "$0")/.."
stamp=.venv/.headrace-setup
want=$(cat pyproject.toml tools/setup.sh | sha256sum | cut -d' ' -f1)
[ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ] && exit 0

fits() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }
python=${PYTHON:-}
if [ -z "$python" ]; then
    for candidate in python3 python3.13 python3.12 python3.11; do
        if command -v "$candidate" >/dev/null && fits "$candidate"; then python=$candidate; break; fi
    done
fi
if [ -z "$python" ] || ! fits "$python"; then
    echo "setup: Headrace needs Python 3.11 or later (set PYTHON=/path/to/python3)" >&2
    exit 1
fi
if [ ! -x .venv/bin/python ]; then
    echo "setup: creating .venv with $($python --version)"
    "$python" -m venv .venv
fi
pip() { .venv/bin/python -m pip --disable-pip-version-check --no-input "$@"; }
if ! .venv/bin/python -c 'import torch' 2>/dev/null; then
    echo "setup: installing ${TORCH:=torch==2.13.0}"
    pip install -q "$TORCH"
fi
echo "setup: installing Headrace and its tools"
pip install -q -e '.[dev,lab]'
echo "$want" > "$stamp"
echo "setup: done"
