"""Tests of fzero/tools/doctor."""
