"""Pipelines that people have already: planned from the live object, without a graph file."""
