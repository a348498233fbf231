"""Tests of the pictures and tables of a state."""
