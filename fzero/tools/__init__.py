"""Tools over the public API: what people look at a step with, and what no step needs to run."""
