#!/usr/bin/env bash
# Install the project with its development tools into .venv, then run every check and the tests.
#
#   scripts/test.sh [options of pytest]        e.g. --slow, or tests/mmjax/test_config.py
#   PYTHON=python3.12 scripts/test.sh          another interpreter (its own folder: .venv-python3.12)
#   TORCH=no scripts/test.sh                   without PyTorch, which may be a download of gigabytes: what is compared
#                                              with it, with transformers and with peft is skipped
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

if [[ "${TORCH:-yes}" == no ]]; then
    "$VENV/bin/python" -m pip install --quiet --no-compile --editable '.[dev,data,audio]' gguf safetensors
else
    install_torch
    "$VENV/bin/python" -m pip install --quiet --no-compile --editable '.[dev,parity,data,audio]'
fi
# For its file of weights alone; what it needs to run is left out.
"$VENV/bin/python" -m pip install --quiet --no-compile --no-deps 'silero-vad==6.2.3'

export PATH="$VENV/bin:$PATH"
ruff format --check .
ruff check .
lint-imports --no-cache
# It would miss what is left out.
[[ "${TORCH:-yes}" == no ]] || pyright --pythonpath "$VENV/bin/python"
# A file goes to one worker: its tests share compiled programs.
python -m pytest -n 2 --dist loadfile "$@"
