"""Mirrors fzero/optim."""
