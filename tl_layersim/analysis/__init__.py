"""analyze, compare and attach: analyzers over data on models; single prompts; runs on servers that are not waited for."""
