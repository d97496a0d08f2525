"""The cache of stage outputs on disk: keys, file format, index, lookup. Knows neither plans nor
devices."""
