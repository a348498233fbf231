"""The same on real ranks: processes that talk over gloo."""
