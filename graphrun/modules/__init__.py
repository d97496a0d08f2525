"""The PyTorch modules of a graph: classes, weight files, quantized layers, call interception."""
