"""What is to be computed: the declaration of a pipeline as stages, components and values. Knows no torch and no device."""
