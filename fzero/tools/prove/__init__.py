"""Prove that a step on any number of ranks is the step of one rank with the mean gradient.

prove(step, state, args, world=W) --> Proof
    .proved, .claims, .unshown     each leaf of the new state: shown, or the line where it fails
    print(proof)                   the theorem, with what it assumes

step --record--> the program of one rank alone, and of ranks among W         (proof)
     --read----> what each value is, over the inputs    (read; ops, names: of each op; terms)
     --check---> the same for each leaf? else where                         (proof, read)
"""

from fzero.tools.prove.proof import Claim as Claim
from fzero.tools.prove.proof import Proof as Proof
from fzero.tools.prove.proof import prove as prove
