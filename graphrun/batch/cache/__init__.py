"""The cache of stage outputs on disk: keys, file format, index and lookup. It handles neither plans
nor devices."""
