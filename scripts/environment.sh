# Sourced by the scripts beside it, in the root of the project: makes or reuses the virtual environment $VENV, whose name
# ends with $SUFFIX.
PYTHON="${PYTHON:-python3}"
VENV=".venv${SUFFIX:-}"
[[ "$PYTHON" == python3 ]] || VENV=".venv-$(basename "$PYTHON")${SUFFIX:-}"
if [[ ! -x "$VENV/bin/python" ]]; then
    "$PYTHON" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' || {
        echo "mmjax needs Python 3.11 or 3.12; $("$PYTHON" --version) is '$PYTHON'. Try: PYTHON=python3.12 $0" >&2
        exit 2
    }
    "$PYTHON" -m venv "$VENV"
fi

# Tests compare with PyTorch, alone and first, so that nothing else chooses its build. Where pip would take a CUDA build
# of several gigabytes, point PIP_EXTRA_INDEX_URL at PyTorch's index of CPU builds.
install_torch() {
    "$VENV/bin/python" -c 'import torch' 2>/dev/null || {
        echo "installing PyTorch into $VENV; where its index has no CPU build this is a download of gigabytes" >&2
        "$VENV/bin/python" -m pip install --quiet --no-compile 'torch==2.13.0'
    }
}
