"""Live diffusers pipelines: attaching to them, planning their calls, importing them as graph
files."""
