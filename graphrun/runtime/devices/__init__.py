"""Devices on which plans run: CUDA, and the simulated accelerator."""
