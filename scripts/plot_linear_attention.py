"""Plot time against length from the output of `scripts/bench_kernels.py linear_attention`.

python scripts/bench_kernels.py linear_attention > times.txt
python scripts/plot_linear_attention.py times.txt growth.png
"""

import argparse
import re
from pathlib import Path

import matplotlib.pyplot as plt

LINE = re.compile(r"KDA T(\d+) H32 strong decay (forward|step) +([\d.]+) ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("times", type=Path)
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    figure, axes = plt.subplots()
    for part in ("forward", "step"):
        found = (match.groups() for match in LINE.finditer(options.times.read_text()))
        points = sorted({int(tokens): float(time) for tokens, kind, time in found if kind == part}.items())
        if not points:
            raise SystemExit(f"{options.times}: no line such as 'KDA T32768 H32 strong decay {part} 3.740 ms'")
        tokens, times = zip(*points, strict=True)
        axes.plot(tokens, times, "o-", label=part)
        axes.plot(tokens, [times[-1] * count / tokens[-1] for count in tokens], ":", color="grey")
    axes.set(xscale="log", yscale="log", xlabel="tokens of a row, 32 heads", ylabel="milliseconds on one H200")
    axes.legend()
    figure.savefig(options.picture)


if __name__ == "__main__":
    main()
