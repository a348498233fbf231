"""Which ranks there are: axes, meshes, process groups, the launcher, virtual ranks.

In: what torchrun or srun says in the environment, a process group, a DeviceMesh, or sizes.
Out: `mesh.Axis`, the record of a set of ranks that every collective and every state names;
`virtual.run_ranks`, which runs W ranks in this process, one at a time.
No collective is called here.
"""
