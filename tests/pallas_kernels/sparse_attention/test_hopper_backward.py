"""What the kernel of gradients adds to device memory: its PTX, carried out here for all threads of a warpgroup."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.sparse_attention.hopper_backward import _adding, in_order, integers_to_floats

KEYS, WIDTH, COLUMN = 70, 192, 64
UNIT = 0.25


def carry_out(instructions, operands, shared, memory, num_bytes):
    """`shared` [64] int32 lies at address 0 of shared memory, `memory` at 0 of device memory, `num_bytes` a number."""
    registers = {f"${place}": operand for place, operand in enumerate(operands)}
    # The second warpgroup's.
    registers["%tid.x"] = np.arange(128, 256)

    def read(name):
        return registers[name] if name in registers else int(name)

    def address(text):
        base, _, offset = text.strip("[]").partition(" + ")
        return read(base) + int(offset or 0)

    binary = {"and": np.bitwise_and, "shl": np.left_shift, "shr": np.right_shift, "add": np.add}
    binary |= {"mul": np.multiply, "max": np.maximum, "setp": np.greater_equal}
    for line in instructions.strip("{} \n").split(";"):
        ((predicate, name, rest),) = re.findall(r"^\s*(?:@(\w+) )?(\S*)\s*([^;]*)$", line)
        if name in ("", ".reg"):
            continue
        target, *sources = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", rest)
        kind = name.split(".")[0]
        if kind == "red":
            is_adding = registers[predicate]
            for place, value in enumerate(sources[0].strip("{}").split(", ")):
                at = np.broadcast_to(address(target) // num_bytes + place, is_adding.shape)
                np.add.at(memory, at[is_adding], read(value)[is_adding])
        elif kind == "ld":
            registers[target] = UNIT if "global" in name else shared[address(sources[0]) // 4]
        elif kind in ("mov", "rcp", "cvt"):
            registers[target] = {"mov": np.array, "rcp": np.reciprocal, "cvt": np.rint}[kind](read(sources[0]))
        elif kind == "mad":
            registers[target] = read(sources[0]) * read(sources[1]) + read(sources[2])
        else:
            registers[target] = binary[kind](*map(read, sources))


@pytest.mark.parametrize("is_integer", [False, True])
def test_rows_are_added_to_their_keys_and_columns_come_into_their_order(is_integer):
    random = np.random.default_rng(0)
    rows = random.integers(-99, 100, (64, 64)).astype(np.float64)
    index = np.where(random.random(64) < 0.2, -1, random.permutation(KEYS)[:64])
    # Of a product's result thread t has rows t / 4 and eight behind of its warp's 16, and pairs of every 8 columns.
    thread = np.arange(128)
    row, column = thread // 32 * 16 + thread % 32 // 4, thread % 4 * 2
    places = [(row + down, column + 8 * right + number) for down in (0, 8) for right in range(8) for number in range(2)]
    operands = [0, 0, COLUMN, *([0] if is_integer else []), *[rows[place] for place in places]]
    memory = np.zeros(KEYS * WIDTH)
    carry_out(_adding(WIDTH, is_integer=is_integer), operands, index, memory, 8 if is_integer else 4)

    found = memory.reshape(KEYS, WIDTH)
    found = found * UNIT if is_integer else np.asarray(in_order(jnp.asarray(found, jnp.float32)))
    expected = np.zeros((KEYS, WIDTH))
    expected[index[index >= 0], COLUMN : COLUMN + 64] = rows[index >= 0]
    np.testing.assert_array_equal(found, expected)


def test_integers_of_two_words_come_back_as_the_numbers_they_count():
    numbers = np.array([0, 1, -1, 5, -7, 2**31, -(2**31), 2**32 - 1, -(2**40) + 3, 2**50])
    words = np.stack([numbers & 0xFFFFFFFF, numbers >> 32], axis=-1)
    words = np.where(words >= 2**31, words - 2**32, words).astype(np.int32)
    found = integers_to_floats(jnp.asarray(words), jnp.asarray([0.5], jnp.float32))
    np.testing.assert_allclose(found, numbers / 2, rtol=1e-7)
