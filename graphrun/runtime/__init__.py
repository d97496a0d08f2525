"""Executes plans: moves weights between disk, host and device while the stages run."""
