"""The benchmark of the shell: many tiny parameters, so that hooks and buckets are all there is."""
