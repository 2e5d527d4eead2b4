"""Models on NDIF servers: requests, shipped traces, failures, split models and adapter training."""
