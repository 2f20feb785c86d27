"""Build: tree and backend to wheel, manifest and environment."""
