"""The planner on systems that others published: `python -m experiments.planner.published`. No JAX, no GPU."""
