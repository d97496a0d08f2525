"""graphrun."""

from graphrun.api import *  # noqa
from graphrun.api import __version__, _reuse, planned_inputs, Session  # noqa
