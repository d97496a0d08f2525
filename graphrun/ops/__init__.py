"""What stages do. An op is one function; the same code runs under the probe and for real.

An op knows its pipeline, its device and its arguments. It knows nothing of memory, plans or weights' whereabouts.
"""

from graphrun.ops.runner import Stages, run_stages

__all__ = ["Stages", "run_stages"]
