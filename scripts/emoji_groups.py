"""Write train.jsonl and held_out.jsonl: which of about 100 groups an emoji belongs to, from OpenMoji's openmoji.json.

python scripts/emoji_groups.py openmoji.json FOLDER
"""

import json
import random
import sys
from pathlib import Path

NUM_HELD_OUT = 150


def main(table: Path, folder: Path) -> None:
    """Each name once; skin tones and OpenMoji's own extras are left out. The split is fixed."""
    groups: dict[str, str] = {}
    for emoji in json.loads(table.read_text(encoding="utf-8")):
        if not emoji["skintone"] and not emoji["group"].startswith("extras"):
            groups.setdefault(emoji["annotation"], emoji["subgroups"])
    names = sorted(groups)
    random.Random(0).shuffle(names)
    for file, chosen in (("held_out.jsonl", names[:NUM_HELD_OUT]), ("train.jsonl", names[NUM_HELD_OUT:])):
        with (folder / file).open("w", encoding="utf-8") as lines:
            for name in chosen:
                question = {"role": "user", "content": f"Which group does the emoji '{name}' belong to?"}
                answer = {"role": "assistant", "content": groups[name]}
                lines.write(json.dumps({"messages": [question, answer]}, ensure_ascii=False) + "\n")
        print(f"{folder / file}: {len(chosen)} questions about {len({groups[name] for name in chosen})} groups")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
