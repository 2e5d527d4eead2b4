"""Early exit: a token leaves the model at the first layer that is sure, and the layers above it do not run."""
