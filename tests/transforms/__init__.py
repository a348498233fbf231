"""Mirrors fzero/transforms."""
