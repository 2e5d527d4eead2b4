"""Training that makes every layer speak the last layer's language."""
