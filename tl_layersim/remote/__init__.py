"""Models on NDIF servers: requests, failures, and what is shipped with them."""
