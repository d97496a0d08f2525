"""Pipelines that are there already as graph files: read from a folder, the hub, a class or a live object; cut where that changes nothing."""
