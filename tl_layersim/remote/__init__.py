"""Models on NDIF servers: requests, traces, failures, split models and adapter training."""
