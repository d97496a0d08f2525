"""The command line."""

from graphrun.cli.app import main

__all__ = ["main"]
