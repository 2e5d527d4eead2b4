"""Models on NDIF servers: requests and their failures, the traces that are shipped, split models, and training of adapters."""
