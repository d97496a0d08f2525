"""Runs graphs many times: lists of requests, their order, the cache of stage outputs, and resuming
after a kill."""
