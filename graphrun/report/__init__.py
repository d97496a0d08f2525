"""Plans, runs and infeasible budgets as text, JSON, SVG and HTML.

All numbers come from `simulate` or from a trace.
"""
