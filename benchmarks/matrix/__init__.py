"""Who takes part in the matrix beside fzero, and the table of it."""
