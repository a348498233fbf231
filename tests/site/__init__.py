"""Tests of docs/, and what writes the tables in it: python -m tests.site.tables."""
