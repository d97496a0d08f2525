"""Plans, runs and infeasible budgets as text, JSON, SVG and HTML, from `simulate` or a trace."""
