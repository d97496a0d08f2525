"""The cache of stage outputs on disk: keys, file format, index, lookup. No plans, no devices."""
