"""The two scans of the backward pass, of states and of their gradients, for Hopper.

Neither waits for the other, and each takes two blocks a head: 32 heads leave half of a GPU's multiprocessors idle. So
they run side by side in one launch where decays are one a head. Where they are one a channel, the states would lie in
memory beside what only the other scan reads and the sums of decays: a tenth more than a step needs.
"""

import jax
from jax import lax

from pallas_kernels.linear_attention import hopper_scan, hopper_scan_back, hopper_states
from pallas_kernels.linear_attention.hopper_carry import launch


def scan_both_ways(
    from_state, writing, reading, from_value, kept, products, inverse, value, beta, output_gradient, entering, leaving
) -> list[tuple[jax.Array, ...]]:  # fmt: skip
    """Results of `hopper_scan_back.scan_back`; and of `hopper_scan.scan` that keeps states, or `hopper_states.states`.

    The latter, without `from_value`, if there is one decay a head; the gradient of the value then is among the former.
    """
    back = from_state, reading, writing, kept, products, inverse, output_gradient, leaving
    if kept.ndim == 3:
        states = hopper_states.states(from_state, value, beta, inverse, writing, kept, entering)
        return launch("scan_both_ways", hopper_scan_back.scan_back(*back, value, beta), states)
    (back,) = launch("scan_chunks_back", hopper_scan_back.scan_back(*back))
    # Behind it, when what only it reads is no longer held.
    (from_state, from_value, writing), back = lax.optimization_barrier(((from_state, from_value, writing), back))
    states = hopper_scan.scan(from_state, from_value, reading, writing, kept, products, entering, keep_states=True)
    return [back, *launch("scan_states", states)]
