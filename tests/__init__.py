"""The tests of fzero; a package, so that a spawned rank can import its functions by name."""
