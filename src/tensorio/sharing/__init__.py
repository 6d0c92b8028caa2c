"""Sharing tensors with other processes of this host: publish once, attach anywhere."""
