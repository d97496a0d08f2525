"""Checks of a plan that are independent of the solver: `check` validates it, `simulate` computes
its bytes and seconds."""
