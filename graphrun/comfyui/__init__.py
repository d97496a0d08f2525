"""Nodes for ComfyUI. ``graphrun comfyui install`` writes the line that loads them.

    custom_nodes/graphrun/__init__.py -> pack -> nodes -> server   a running `graphrun serve` draws
                                                     \\-> engine   a `Session` in ComfyUI's process
                                                            \\-> memory   what ComfyUI knows of it

ComfyUI's own modules (``comfy``, ``comfy_api``) exist in its process only, so functions import
them. The server's node needs no package that ComfyUI does not need itself.
"""
