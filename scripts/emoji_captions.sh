#!/usr/bin/env bash
# Fetch emoji drawn by four artists and their names from npm, and write pictures, questions and a tokenizer.
#
#   scripts/emoji_captions.sh [FOLDER]   default: data/emoji_captions; 7 MB are fetched
#   python -m mmjax.train --experiment emoji_captions
#
# Licences: Noto Apache-2.0, OpenMoji CC BY-SA 4.0, Fluent Emoji MIT, Twemoji CC BY 4.0, unicode-emoji-json MIT.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

folder="${1:-data/emoji_captions}"
downloads="$folder/downloads"
mkdir -p "$downloads"

"$VENV/bin/python" -c 'import mmjax' 2>/dev/null || "$VENV/bin/python" -m pip install --quiet --editable .
# Draws SVG; used here alone.
"$VENV/bin/python" -c 'import resvg_py' 2>/dev/null ||
    "$VENV/bin/python" -m pip install --quiet --no-deps resvg-py==0.5.0
while read -r sum file package; do
    archive="$downloads/$file"
    [[ -f "$archive" ]] || curl --fail --silent --show-error --location --output "$archive" \
        "https://registry.npmjs.org/$package/-/$file"
    sha256sum --check --quiet <<<"$sum  $archive"
    target="$downloads/$(basename "$package")"
    mkdir -p "$target"
    tar -xzf "$archive" -C "$target" --strip-components=1
done <<SUMS
3e918d88fc945c0bb3d468dbace6f88caef67f01c9f0e7bcae0915a042e8f1ad noto-1.2.9.tgz @iconify-json/noto
03181e2c156cab35cf4a62f1f7886bd971d59212e75ac3f189d5a4cae3930fc5 openmoji-1.2.29.tgz @iconify-json/openmoji
7d064769dee690815f823bc5bcc511d957198caf9f5edd8dd9c1aa48a6aeb175 fluent-emoji-flat-1.2.6.tgz @iconify-json/fluent-emoji-flat
19046dff7d8707ce96212ec86468b36ac5f8e60409629dd13f809265c6d0ebb7 twemoji-1.2.5.tgz @iconify-json/twemoji
ae7efacb55533385bf8767d613dbd36c71226669759d95919a6e9059f5e4c401 unicode-emoji-json-0.9.0.tgz unicode-emoji-json
SUMS
"$VENV/bin/python" scripts/emoji_captions.py "$downloads" "$folder"
