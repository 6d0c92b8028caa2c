"""Encryption at rest: files, or chosen tensors of one, by AES-256-GCM in chunks. docs/encryption.md has every byte."""
