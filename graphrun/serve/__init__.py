"""An HTTP server for graphs that make pictures. Requests are admitted by their plans, and a
separate process runs them.

    client -> app -> asked -> service -> line -> worker process (sessions)
                                 |
                                 +-> planner process (plans of new sizes)

The server process itself does not import torch.
"""
