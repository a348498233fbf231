"""Mirrors fzero/state."""
