"""Lists of requests: schedules, the cache of stage outputs, and resuming after a kill."""
