"""Speed and quality of the data pipeline on this machine: throughput, fill, balance, memory, resume, FLOPs, shapes.

python scripts/bench_data.py

Texts are parts of Python's own sources, pictures random JPEGs of 336 x 336 pixels; nothing is fetched.
"""

import dataclasses
import json
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import PIL.Image
import tokenizers

from mmjax.config import DataConfig, ModelConfig, VisionConfig
from mmjax.data.align import Sizes
from mmjax.data.cost import predicted_costs
from mmjax.data.loader import Loader
from mmjax.data.microbatch import BufferPool, balanced_order, cost_balance
from mmjax.data.packing import Room, arrange, first_fit, pack
from mmjax.planner.cost import batch_flops, training_flops, vision_training_flops

MODEL = ModelConfig(width=1024, num_layers=24, full_attention_layers=(3, 7, 11, 15, 19, 23))
VISION = VisionConfig(num_layers=12, width=512, num_heads=8, head_width=64, hidden_width=2048, patch_pixels=14)
MODEL = dataclasses.replace(MODEL, vision=VISION)


def real_texts() -> list[str]:
    """Parts, between blank lines, of Python's own sources."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    texts = {part for file in files for part in file.read_text(errors="replace").split("\n\n") if part.strip()}
    return sorted(texts)


def write_text(folder: Path) -> tuple[Path, Path]:
    """A JSONL of conversations about those texts, and a BPE tokenizer of 8,192 tokens trained on them."""
    texts = real_texts()
    with (folder / "text.jsonl").open("w") as file:
        for text in texts:
            half = len(text) // 2
            turns = [{"from": "human", "value": text[:half]}, {"from": "gpt", "value": text[half:]}]
            file.write(json.dumps({"conversations": turns}) + "\n")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    special = ["<|media_pad|>", "<|end_of_msg|>"]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=8192, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "text.jsonl", folder / "tokenizer.json"


def write_pictures(folder: Path, count: int = 200) -> Path:
    """A JSONL of conversations with one smooth JPEG of 336 x 336 pixels each."""
    random = np.random.default_rng(0)
    with (folder / "pictures.jsonl").open("w") as file:
        for number in range(count):
            small = PIL.Image.fromarray(random.integers(0, 256, (24, 24, 3), np.uint8))
            small.resize((336, 336), PIL.Image.Resampling.BICUBIC).save(folder / f"{number}.jpg", quality=90)
            turns = [{"from": "human", "value": "<image>what?"}, {"from": "gpt", "value": "a pattern"}]
            file.write(json.dumps({"image": f"{number}.jpg", "conversations": turns}) + "\n")
    return folder / "pictures.jsonl"


def rate(loader: Loader, steps: int, pool: BufferPool) -> tuple[float, float, float]:
    """(real tokens, pictures) a second of `steps` batches made ahead by threads, and how many cores that took."""
    stream = loader.iterate(0, pool=pool)
    pool.release(next(stream))
    begun, worked, tokens, pictures = time.perf_counter(), time.process_time(), 0, 0
    for _ in range(steps):
        batch = next(stream)
        tokens += int((batch.segment_ids > 0).sum())
        pictures += int(batch.patch_segment_ids.max(axis=1, initial=0).sum())
        pool.release(batch)
    seconds = time.perf_counter() - begun
    return tokens / seconds, pictures / seconds, (time.process_time() - worked) / seconds


def memory_text(loader: Loader, pool: BufferPool) -> str:
    """What a pool holds after a run of batches and one more that is still in use."""
    batch = loader.batch(0, pool=pool)
    report = pool.report()
    pool.release(batch)
    return (
        f"host memory: {report.held_bytes / 2**20:.1f} MiB in {report.num_slabs} slabs, used again"
        f" {report.num_reused:,} times; {report.inner_fragmentation:.2%} of a batch's slabs empty;"
        f" {report.idle_share:.2%} of all slabs idle beside one batch"
    )


def num_shapes(folder: Path, buckets: int) -> int:
    """Different shapes, each a compilation of the step, of 200 batches with pictures of 200 random aspect ratios."""
    random = np.random.default_rng(0)
    with (folder / "shapes.jsonl").open("w") as file:
        for number in range(200):
            height, width = np.exp(random.uniform(np.log(8), np.log(600), 2)).astype(int)
            PIL.Image.new("RGB", (int(width), int(height))).save(folder / f"shape-{number}.png")
            turns = [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "x"}]
            file.write(json.dumps({"image": f"shape-{number}.png", "conversations": turns}) + "\n")
    data = DataConfig(
        source=str(folder / "shapes.jsonl"),
        rows=1,
        row_tokens=300,
        row_patches=1024,
        image_max_patches=1024,
        packing_window=1,
        patch_buckets=buckets,
    )
    loader = Loader(data, VISION, 0, model=MODEL)
    return len({tuple(array.shape for array in loader.batch(step)) for step in range(200)})


def resume_seconds(loader: Loader, data: DataConfig, step: int) -> float:
    """Time from a saved position (made up: packing all chapters before it would take long) to that step's batch."""
    first_row = step * data.rows
    position = {"chapter": first_row // 300, "first_row": first_row - 5}
    begun = time.perf_counter()
    loader.resume(position)
    loader.batch(step)
    return time.perf_counter() - begun


def mixture(count: int, row_tokens: int) -> tuple[np.ndarray, list[list[int]]]:
    """Sizes of text (60 %), text with pictures (30 %) and video of 4 to 16 frames (10 %); patches of each picture."""
    random = np.random.default_rng(0)
    lengths = np.array([len(text.encode()) // 3 + 8 for text in real_texts()])
    sizes, images = [], []
    for kind in random.random(count):
        text = int(min(random.choice(lengths), row_tokens // 2))
        if kind < 0.6:
            patches = []
        elif kind < 0.9:
            patches = (4 * random.integers(16, 257, random.integers(1, 4))).tolist()
        else:
            patches = [int(4 * random.integers(16, 65))] * int(random.integers(4, 17))
        tokens = text + sum(patches) // 4
        sizes.append(Sizes(tokens, sum(patches), text // 2, sum(number**2 for number in patches)))
        images.append(patches)
    return np.array(sizes), images


def flops_a_useful_token(sizes: np.ndarray, images: list[list[int]], row_tokens: int, row_patches: int) -> list[float]:
    """FLOPs spent over FLOPs needed, batches of 8 samples or rows: padded; documents in rows; ours.

    A padded sample is as long as the longest of its batch, its pictures as large as the largest. With documents in
    rows (first fit by length) attention stays inside them, and a row's pictures are padded to the fullest row's.
    Padding of a row costs what its projections cost.
    """
    needed = batch_flops(MODEL, sizes[:, 0].tolist(), [number for each in images for number in each]).total
    padded = 0.0
    for start in range(0, len(sizes), 8):
        batch = sizes[start : start + 8]
        here = images[start : start + 8]
        longest, most = int(batch[:, 0].max()), max(len(each) for each in here)
        largest = max((number for each in here for number in each), default=0)
        padded += batch_flops(MODEL, [longest] * len(batch), [largest] * (most * len(batch))).total
    token = sum(training_flops(MODEL, 1).values())
    patch = vision_training_flops(MODEL, 1)

    def in_rows(rows: list[list[int]], patch_room: list[int]) -> float:
        tokens = sum(row_tokens - int(sizes[row, 0].sum()) for row in rows)
        patches = sum(room - int(sizes[row, 1].sum()) for row, room in zip(rows, patch_room, strict=True))
        return needed + tokens * token + patches * patch

    by_length = first_fit([(int(length), 0) for length in sizes[:, 0]], (row_tokens, 0))
    fullest = max(int(sizes[row, 1].sum()) for row in by_length)
    room = Room(tokens=row_tokens, patches=row_patches, image_patches=row_patches)
    ours = pack(sizes[:, 0], sizes[:, 1], predicted_costs(sizes, MODEL), room=room, window=256)
    varied = in_rows(by_length, [fullest] * len(by_length))
    return [padded / needed, varied / needed, in_rows(ours, [row_patches] * len(ours)) / needed]


def balance(sizes: np.ndarray, row_tokens: int, row_patches: int) -> tuple[float, float, float]:
    """(fill, max / mean cost of 8 ranks, that of samples dealt out at random), means over steps of 16 rows."""
    random = np.random.default_rng(0)
    costs = predicted_costs(sizes, MODEL)
    room = Room(tokens=row_tokens, patches=row_patches, image_patches=row_patches)
    rows = pack(sizes[:, 0], sizes[:, 1], costs, room=room, window=256)
    row_costs = np.array([costs[row].sum() for row in rows])
    arranged = arrange(row_costs, 0, 8, random.permutation)
    ours, dealt = [], []
    for start in range(0, len(rows) - 15, 16):
        step = [int(row_costs[row]) for row in arranged[start : start + 16]]
        ours.append(cost_balance([step[row] for row in balanced_order(step)], 8))
        samples = random.permutation(len(sizes))[: len(sizes) // len(rows) * 16].reshape(8, -1)
        dealt.append(cost_balance(costs[samples].sum(axis=1).tolist(), 8))
    return float(sizes[:, 0].sum() / (row_tokens * len(rows))), float(np.mean(ours)), float(np.mean(dealt))


def main() -> None:
    """Run all and print one line each."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text, tokenizer = write_text(folder)
        for label, name in (("bytes", "bytes"), ("BPE", str(tokenizer))):
            data = DataConfig(
                source=str(text),
                tokenizer=name,
                rows=8,
                row_tokens=4096,
                row_patches=4,
                packing_window=256,
                too_long="drop",
            )
            loader = Loader(data, VisionConfig(num_layers=0), 0, model=MODEL)
            tokens, _, cores = rate(loader, 20, BufferPool())
            fill = loader.counters()["fill_rate"]
            print(f"text, {label}: {tokens:,.0f} packed tokens/s on {cores:.2f} cores, fill {fill:.2%}", flush=True)
        early, late = (resume_seconds(loader, data, step) for step in (10, 100_000))
        print(f"resume at step 10: {early:.3f} s, at step 100,000: {late:.3f} s", flush=True)
        data = DataConfig(
            source=str(write_pictures(folder)), rows=4, row_tokens=1024, row_patches=2400, image_max_patches=1024
        )
        loader, pool = Loader(data, VISION, 0, model=MODEL), BufferPool()
        _, pictures, cores = rate(loader, 30, pool)
        print(f"pictures of 336 pixels: {pictures:,.0f} decoded/s on {cores:.2f} cores", flush=True)
        print(memory_text(loader, pool), flush=True)
        for buckets in (1, 4):
            print(f"200 aspect ratios, {buckets} buckets: {num_shapes(folder, buckets)} shapes", flush=True)
    sizes, images = mixture(4096, 4096)
    # As many patches a row as the mixture has, and 5 % more.
    row_patches = int(1.05 * 4096 * sizes[:, 1].sum() / sizes[:, 0].sum()) // 4 * 4
    fill, ours, dealt = balance(sizes, 4096, row_patches)
    print(
        f"text, pictures and video: fill {fill:.2%}; cost max/mean of 8 ranks {ours:.3f}, dealt at random {dealt:.3f}"
    )
    padded, varied, packed = flops_a_useful_token(sizes, images, 4096, row_patches)
    print(f"FLOPs spent over needed: padded {padded:.2f}, documents in rows {varied:.2f}, packed by cost {packed:.2f}")


if __name__ == "__main__":
    main()
