"""The operations (ops) of the stages of a graph.

An op is one function, which runs in dry runs and in real runs. It gets its pipeline, device and
arguments, and does not depend on memory or plans.
"""

from graphrun.ops.runner import Stages

__all__ = ["Stages"]
