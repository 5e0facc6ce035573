"""Launching kernels of Pallas Mosaic GPU: what differs between JAX releases, devices and a CPU that only simulates."""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

THREAD_OF_WARPGROUP = "mov.u32 thread, %tid.x; and.b32 thread, thread, 127;"
"""PTX that sets its register `thread` to the number of the thread in its warpgroup."""

REGISTERS_OF_BLOCK = 65536

_is_simulated = ContextVar("is_simulated", default=False)
_detects_races = ContextVar("detects_races", default=False)


@contextlib.contextmanager
def simulated(*, detect_races: bool = False) -> Iterator[None]:
    """Within: kernels traced run interpreted on a CPU, one block of the grid instead of one per multiprocessor.

    With `detect_races` warpgroups and bulk copies (not a warpgroup's warps) are watched, see `has_raced`.
    """
    tokens = _is_simulated.set(True), _detects_races.set(detect_races)
    try:
        yield
    finally:
        _is_simulated.reset(tokens[0])
        _detects_races.reset(tokens[1])


def has_raced() -> bool:
    """Whether the last kernel simulated so used shared memory without waiting for what it was written or read by."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    return gpu_callbacks.get_races().races_found


def is_simulated() -> bool:
    """Whether kernels traced now run interpreted on a CPU."""
    return _is_simulated.get()


def is_hopper() -> bool:
    """Whether kernels traced now will run on (or be compiled for) a Hopper GPU, or are simulated."""
    if _is_simulated.get():
        return True
    if (abstract := jax.sharding.get_abstract_mesh().abstract_device) is not None:
        return any(name in abstract.device_kind for name in ("H100", "H200", "H800", "GH200"))
    return jax.default_backend() == "gpu" and jax.devices()[0].compute_capability == "9.0"


def num_multiprocessors() -> int:
    """Multiprocessors of the device that kernels traced now will run on."""
    if _is_simulated.get():
        return 1
    if (abstract := jax.sharding.get_abstract_mesh().abstract_device) is not None:
        return abstract.num_cores
    return jax.devices()[0].core_count


def registers(*of_threads: int) -> tuple[int, ...]:
    """Registers of a thread in each of a block's warpgroups, as given.

    Raises:
        ValueError: they add up to more than the block starts with, so that warpgroups would wait for them for ever.
    """
    start = REGISTERS_OF_BLOCK // (128 * len(of_threads)) // 8 * 8
    if sum(of_threads) > start * len(of_threads):
        raise ValueError(
            f"{of_threads} registers of {len(of_threads)} warpgroups that start with {start} a thread each"
        )
    return of_threads


def swizzled(shape: Sequence[int], dtype: Any) -> Any:
    """A buffer in shared memory whose last two axes lie as tensor cores and bulk copies read them fastest."""
    return plgpu.SMEM(tuple(shape), dtype, transforms=swizzle(shape[-1], dtype))


def swizzle(width: int, dtype: Any) -> tuple[Any, ...]:
    """How the last two axes of such a buffer lie."""
    num_bytes = min(128, width * np.dtype(dtype).itemsize)
    elements = num_bytes // np.dtype(dtype).itemsize
    return plgpu.TilingTransform((8, elements)), plgpu.SwizzleTransform(num_bytes)


def vary_together(*arrays: jax.Array) -> list[jax.Array]:
    """The arrays, marked as varying over every mesh axis that one of them varies over. Their transposes sum over it."""
    varying = [jax.typeof(array).manual_axis_type.varying for array in arrays]
    axes = frozenset().union(*varying)
    return [
        jax.lax.pcast(array, tuple(sorted(axes - own)), to="varying") if axes - own else array
        for array, own in zip(arrays, varying, strict=True)
    ]


def traced_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function(options, *arrays)`, traced and lowered once for equal options and shapes, however many layers call it.

    Tracing and lowering one kernel takes up to a second.
    """

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def run(_: bool, options: Any, *arrays: Any) -> Any:
        return function(options, *arrays)

    @functools.wraps(function)
    def call(options: Any, *arrays: Any) -> Any:
        # Simulated kernels are other programs.
        return run(_is_simulated.get(), options, *arrays)

    return call


@functools.cache
def log_once(message: str, level: int = logging.INFO) -> None:
    """Log which implementation was taken, each message once a process."""
    logging.getLogger("pallas_kernels").log(level, message)


def launch(
    body: Callable[..., None],
    arguments: Sequence[jax.Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
    *,
    scratch: Mapping[str, Any],
    name: str,
    in_place: Mapping[int, int] | None = None,
    reduction_bytes: int = 512,
    **mesh: Any,
) -> Sequence[jax.Array]:
    """Run `body(*arguments, *outputs, **scratch)` on refs. Outputs vary over the mesh axes that arguments vary over.

    `in_place` maps the place of an argument to that of the output which takes its memory; `reduction_bytes` of shared
    memory are for sums over more than a warp holds.
    """
    interpret = None
    if _is_simulated.get():
        from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

        interpret = InterpretGPUParams(detect_races=_detects_races.get())
    arguments = vary_together(*arguments)
    body.__name__ = name
    compiler_params = plgpu.CompilerParams(
        approx_math=True,
        unsafe_no_auto_barriers=True,
        reduction_scratch_bytes=reduction_bytes,
        lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
    )
    options = {"interpret": interpret, "compiler_params": compiler_params}
    if in_place:
        kernel = _kernel_in_place(body, outputs, scratch, in_place, plgpu.Mesh(**mesh), name, **options)
    else:
        kernel = plgpu.kernel(body, out_type=list(outputs), scratch_types=dict(scratch), **options, **mesh)
    # A kernel's outputs are not marked as varying.
    return vary_together(*kernel(*arguments), arguments[0])[:-1]


def _kernel_in_place(
    body: Callable[..., None],
    outputs: Sequence[jax.ShapeDtypeStruct],
    scratch: Mapping[str, Any],
    in_place: Mapping[int, int],
    mesh: Any,
    name: str,
    *,
    interpret: Any,
    compiler_params: Any,
) -> Callable[..., Sequence[jax.Array]]:
    """What `plgpu.kernel` does, which has no argument for outputs in the place of arguments."""
    from jax._src import config
    from jax._src.pallas import mpmd

    def on_refs(*refs: Any) -> None:
        pl.run_scoped(functools.partial(body, *refs), collective_axes=mesh.thread_name or (), **scratch)

    def run(*arguments: jax.Array) -> Sequence[jax.Array]:
        with config._check_vma(False):
            return mpmd._mpmd_map(
                [(mesh, on_refs)],
                out_types=list(outputs),
                input_output_aliases=in_place,
                interpret=interpret or False,
                compiler_params=compiler_params,
                name=name,
            )(*arguments)

    return run


def draw(counter: Any, last: Any, drawn: Any, number: jax.Array) -> None:
    """Write the next number of `counter` [], from 0 to `last` [1] and then 0 again, to shared memory `drawn`.

    One thread does so for its warpgroup. A simulated grid has one block, whose draws are numbered by `number`.
    """
    if _is_simulated.get():
        drawn[...] = number
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 3)
    def take_number(_, counter, last, drawn):
        from jax.experimental.mosaic.gpu import utils
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import llvm

        is_taking = utils.single_thread_predicate(utils.ThreadSubset.WARPGROUP)
        instructions = (
            "{ .reg .u32 limit, old; @$3 ld.global.u32 limit, [$1];"
            " @$3 atom.global.inc.u32 old, [$0], limit; @$3 st.shared.u32 [$2], old; }"
        )
        operands = [utils.memref_ptr(ref) for ref in (counter, last, drawn)]
        void = ir.Type.parse("!llvm.void")
        llvm.inline_asm(void, [*operands, is_taking], instructions, "l,l,r,b", has_side_effects=True)

    take_number(counter, last, drawn)  # pyright: ignore[reportCallIssue]


def run_ptx(
    instructions: str, constraints: str, refs: Sequence[tuple[Any, tuple]] = (), scalars: Sequence = ()
) -> None:
    """Insert PTX: its operands are addresses of refs, each given with its transforms, then int32 scalars."""
    types = [plgpu.RefType(transforms) for _, transforms in refs] + [plgpu.Layout.WG_SPLAT for _ in scalars]

    @plgpu.inline_mgpu(arg_types=tuple(types))
    def insert(_, *operands):
        from jax.experimental.mosaic.gpu import utils
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import llvm

        values = [utils.memref_ptr(operand) for operand in operands[: len(refs)]]
        values += [operand.registers.item() for operand in operands[len(refs) :]]
        void = ir.Type.parse("!llvm.void")
        llvm.inline_asm(void, values, instructions, constraints, has_side_effects=True)

    insert(*[ref for ref, _ in refs], *scalars)  # pyright: ignore[reportCallIssue]


def row_layout() -> Any:
    """How a warpgroup holds one value for each row of a matrix product's result."""
    return plgpu.Layout.WGMMA.reduce(1)


def load(ref: Any, layout: Any, *, is_strided: bool = False) -> jax.Array:
    """Read a ref into registers held as `layout`; `is_strided` where threads must read single values."""
    if _is_simulated.get():
        return ref[...]
    index = (...,) if jax.__version_info__ < (0, 11) else ()
    return plgpu.load(ref, *index, layout=layout, optimized=not is_strided)
