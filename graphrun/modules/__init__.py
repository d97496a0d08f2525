"""The PyTorch modules of a graph: their classes, the files of their weights, quantized layers, and
call interception."""
