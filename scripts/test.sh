#!/usr/bin/env bash
# Install the project with its development tools into .venv, then run every check and the tests.
#
#   scripts/test.sh [options of pytest]        e.g. --slow, or tests/mmjax/test_config.py
#   PYTHON=python3.12 scripts/test.sh          another interpreter (its own folder: .venv-python3.12)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

install_torch
"$VENV/bin/python" -m pip install --quiet --no-compile --editable '.[dev,parity,data,audio]'
# For its file of weights alone; what it needs to run is left out.
"$VENV/bin/python" -m pip install --quiet --no-compile --no-deps 'silero-vad==6.2.3'

export PATH="$VENV/bin:$PATH"
ruff format --check .
ruff check .
lint-imports --no-cache
pyright --pythonpath "$VENV/bin/python"
# A file goes to one worker: its tests share compiled programs.
python -m pytest -n 2 --dist loadfile "$@"
