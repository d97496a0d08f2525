"""Turns a graph, a device and two budgets into a `Problem`: bytes and seconds of everything,
without weights and without a GPU."""
