"""Tests of fzero/doctor."""
