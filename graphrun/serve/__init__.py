"""An HTTP server for graphs that make pictures: requests are admitted by plan, and run in a process
of their own.

    client -> app -> asked -> service -> line -> worker process (sessions)       planner process
    (plans of new sizes)

The server's own process imports no torch.
"""
