"""``python -m graphrun``: the command line."""

from graphrun.cli.main import main

main()
