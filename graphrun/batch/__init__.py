"""Run graphs many times: lists of requests, their schedules, the cache of stage outputs, and
resuming after a kill."""
