"""Devices that run plans: CPU, CUDA, other accelerators, and the simulated machine."""
