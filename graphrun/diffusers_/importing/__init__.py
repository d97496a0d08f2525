"""Import of pipelines as graph files: from a folder, a hub repository, one file, a class or a live
object."""
