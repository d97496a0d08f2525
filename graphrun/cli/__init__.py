"""The command line, built with typer. The only package that prints."""
