"""Validation and simulation of a plan, independent of the solver."""
