"""diffusers pipelines as live objects: attaching to them, planning their calls, and importing them
as graph files."""
