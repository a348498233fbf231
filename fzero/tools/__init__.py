"""Tools over the public API, which inspect a step. No step needs them to run.

trace, compile  the step as one graph of ops, and that graph compiled
plan            memory, traffic and time of a step on any number of ranks, without the hardware
record          any recorded update again, and where a run went wrong
certify, diff   is a step that of one process; where do two runs differ first (`compare`: shared)
plot            pictures of states, plans and traces
doctor          tests the collectives of this installation
"""
