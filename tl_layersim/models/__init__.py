"""Models of this process: where their activations are read, their blocks, their final norm and unembedding."""
