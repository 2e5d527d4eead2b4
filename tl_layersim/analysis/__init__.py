"""`analyze`, `compare` and `attach`: analyzers over data on one model or two; figures of single prompts; runs on servers."""
