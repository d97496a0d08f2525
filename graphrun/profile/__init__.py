"""Turn a graph, a device and two budgets into a `Problem`, without weights and without a GPU."""
