"""Runs that are many: lists of inputs, sessions, and runs that go on after they were killed. Above planning and executing."""
