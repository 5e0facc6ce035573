#!/usr/bin/env bash
# Install the project into .venv and train a small model on pictures of digits: minutes on a CPU. Again: it goes on.
#
#   scripts/demo.sh [options of mmjax.train]   e.g. --training.steps 50
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

# Installed before: nothing to fetch, so a stopped run goes on without a network.
"$VENV/bin/python" -m pip show --quiet mmjax 2>/dev/null || "$VENV/bin/python" -m pip install --quiet --editable .
# In place of this shell, so that a signal reaches the training run, which then saves.
exec "$VENV/bin/python" -m mmjax.train --experiment digits_cpu "$@"
