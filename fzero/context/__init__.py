"""What surrounds a call: torch's modes, autocast, a trace, the virtual rank of this thread.

In: nothing but what torch and this thread hold at the moment.
Out: `here` (which virtual rank this is), `modes` (which modes are active), `ambient` (the modes of
a thread, taken in one place and entered in another), `torch_globals` (those of the process).
`generators` sets torch's random numbers for a block. `later` imports names of a package at their
first use.
"""
