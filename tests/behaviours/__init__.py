"""What a sharded training step must do, one file for a few related behaviours."""
