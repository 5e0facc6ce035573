#!/usr/bin/env bash
# Compile the kernels for a Hopper GPU without having one: minutes on a CPU.
#
#   scripts/compile.sh [options of pytest]     e.g. tests/pallas_kernels/linear_attention
#
# In an environment of its own, .venv-deviceless: beside the CUDA plug-in other programs would look for a GPU. CUDA's
# compiler and cuDNN may be a download of more than a gigabyte. Exit code 69: they could not be installed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
SUFFIX=-deviceless
source scripts/environment.sh

"$VENV/bin/python" -m pip install --quiet --no-compile --editable '.[dev,deviceless]' || {
    echo "the kernels were not compiled for a GPU: the extra deviceless could not be installed, see above" >&2
    exit 69
}
[[ $# -gt 0 ]] || set -- tests/pallas_kernels tests/mmjax/models/test_fused_attention.py
"$VENV/bin/python" -m pytest -n 2 --slow -k compile "$@"
