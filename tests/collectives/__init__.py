"""Mirrors fzero/collectives."""
