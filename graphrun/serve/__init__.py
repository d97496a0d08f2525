"""An HTTP server for graphs that make pictures.

Requests are admitted by their plans, and a separate process runs them. The server process does not
import torch.

    client -> app -> asked -> service -> line -> worker process (sessions)
                                 |
                                 +-> planner process (plans of new sizes)
"""
