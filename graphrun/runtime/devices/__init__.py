"""Devices that run plans: CUDA and the simulated accelerator."""
