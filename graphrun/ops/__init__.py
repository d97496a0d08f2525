"""The operations that stages of a graph run. An op is one function; the same code runs in the dry
run and in a real run.

An op gets its pipeline, its device and its arguments. It knows nothing of memory or plans.
"""

from graphrun.ops.runner import Stages

__all__ = ["Stages"]
