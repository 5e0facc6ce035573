"""The text of a mesh on a command line: `4x2x16` or `fsdp=2,expert=64`."""

import dataclasses
import difflib
import re

from mmjax import axes
from mmjax.config.settings import MeshConfig
from mmjax.errors import ConfigurationError

# The three axes of the short form, in its order.
SHORT_AXES = (axes.PIPE, axes.TENSOR, axes.EXPERT)

MESH_AXIS_PURPOSES = {
    axes.PIPE: "stages of layers, one after the other",
    axes.REPLICA: "copies of everything; rows of a batch are split",
    axes.FSDP: "rows of a batch are split; weights rest split and are gathered where a layer uses them",
    axes.CONTEXT: "positions of a row are split",
    axes.EXPERT: "routed experts live here; rows of a batch and dense weights at rest are split too",
    axes.TENSOR: "heads, hidden widths and the vocabulary are split",
}


def parse_mesh(text: str) -> MeshConfig:
    """Read `4x2x16` (pipe x tensor x expert) or `fsdp=2,expert=64`; axes not named are 1, one may be -1.

    Raises:
      ConfigurationError: anything else; the message names the axes and the nearest one.
    """
    text = text.strip()
    if re.fullmatch(r"-?\d{1,9}(x-?\d{1,9}){2}", text):
        sizes = dict(zip(SHORT_AXES, (int(size) for size in text.split("x")), strict=True))
    else:
        sizes = _named_sizes(text)
    if bad := [f"{name}={size}" for name, size in sizes.items() if size < 1 and size != -1]:
        raise _error(text, "sizes of at least 1, or -1", f"mend {', '.join(bad)}")
    if sum(size == -1 for size in sizes.values()) > 1:
        raise _error(text, "at most one axis of -1 (all devices that are left)", "give the other axes a size")
    return dataclasses.replace(MeshConfig(), **sizes)


def describe_mesh(mesh: MeshConfig) -> str:
    """`pipe=4 tensor=2 expert=16`: the axes that split anything, or `one device`."""
    used = [f"{name}={size}" for name, size in mesh.sizes.items() if size != 1]
    return " ".join(used) or "one device"


def _named_sizes(text: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\w+)\s*=\s*(-?\d{1,9})\s*", part)
        if match is None:
            raise _error(
                text,
                f"three numbers {' x '.join(SHORT_AXES)} such as 4x2x16, or names such as fsdp=2,expert=64",
                f"mend {part.strip()!r}; the axes are {', '.join(axes.MESH_AXES)}",
            )
        name, size = match[1], int(match[2])
        if name not in axes.MESH_AXES:
            nearest = difflib.get_close_matches(name, axes.MESH_AXES, n=1)
            raise _error(
                text,
                f"axes out of {', '.join(axes.MESH_AXES)}",
                f"did you mean {nearest[0]!r} for {name!r}?" if nearest else f"rename or remove {name!r}",
            )
        if name in sizes:
            raise _error(text, "each axis once", f"remove one {name!r}")
        sizes[name] = size
    return sizes


def _error(text: str, expected: str, remedy: str) -> ConfigurationError:
    return ConfigurationError("--mesh", found=repr(text), expected=expected, remedy=remedy)
