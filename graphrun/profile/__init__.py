"""How much: a graph, a device and two budgets become a `Problem`, with no weights and no GPU."""
