"""Outputs of stages on disk: under which key, in which form, and when an entry does not count. Knows no plan and no device."""
