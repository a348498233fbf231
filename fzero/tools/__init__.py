"""Tools over the public API: what people look at a step with, and what no step needs to run.

trace, compile  the step as one graph of ops, and that graph compiled
plan            what a step takes on each rank, of any number of ranks, without running it
certify, diff   is it the step of one process; and where two runs part; `compare` is what they share
plot            pictures of states, plans and traces
doctor          what is wrong with this installation
"""
