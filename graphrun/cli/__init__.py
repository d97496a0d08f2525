"""The command line. The only package that prints, and the only one that knows a terminal."""
