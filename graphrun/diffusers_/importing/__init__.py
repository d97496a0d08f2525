"""Import of pipelines as graph files: from a folder, hub repository, file, class or live object."""
