"""Graph files: a pipeline as stages, components, inputs and outputs. Pure: no torch, no devices."""
