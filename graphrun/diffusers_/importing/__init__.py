"""Pipelines that are there already, as graph files: a folder, a repository, a class or a live object; cut where nothing changes."""
