"""Models on NDIF servers: requests and their failures, the traces that are shipped, split models, and training of adapters.

Other packages may import from these modules:

- `open`: `open_source` and `open_split_model`, for models in this process and on servers alike.
- `source`: `RemoteSource`, a model on a server.
- `request_sizes`: `RequestSchedule` and `MOST_BATCHES`, the number of batches in a request.
- `packed_sizes`: `packed_request` and `packed_result`, the bytes of requests and results without a server.
- `client`, `failures`, `traces`: `NdifClient`, `TransientFailure` and `partial_sums`, for jobs that are not waited for.
- `adapter_training`: training of adapters in the residual stream of a model that nnsight runs.
"""
