"""Graph files: a pipeline declared as stages, components, inputs and outputs. Pure: no torch, no
devices."""
